"""What models train on and validate on."""

import hashlib
from typing import Any, NamedTuple

import numpy as np


class Text(NamedTuple):
    """Tokens to train on and tokens of other files to validate on.

    Attributes:
        train: uint8 or uint16 of shape `(train_tokens,)`, each below `vocabulary`.
        validation: the same dtype, of shape `(validation_tokens,)`.
        files: how many files both parts have.
        vocabulary: how many tokens there are; 256 where each byte is one.
        name: of the text and its version.
        validation_bytes: of the files that `validation` holds. A loss in nats per token times
            `validation_tokens / validation_bytes` is one in nats per byte.
    """

    train: np.ndarray
    validation: np.ndarray
    files: int
    vocabulary: int
    name: str
    validation_bytes: int

    def identity(self) -> dict[str, Any]:
        """Returns name and sizes, and the SHA-256 of the training tokens followed by the others."""
        digest = hashlib.sha256(self.train)
        digest.update(self.validation)
        return {
            "name": self.name,
            "files": self.files,
            "train_tokens": self.train.size,
            "validation_tokens": self.validation.size,
            "validation_bytes": self.validation_bytes,
            "vocabulary": self.vocabulary,
            "sha256": digest.hexdigest(),
        }
