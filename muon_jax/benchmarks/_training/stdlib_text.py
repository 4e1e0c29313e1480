"""Text that every machine has: the source of Python's standard library."""

import hashlib
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_VALIDATION_EVERY = 10  # files
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}  # folders


class Text(NamedTuple):
    """Bytes to train on and bytes of other files to validate on, uint8 of shape `(bytes,)`."""

    train: np.ndarray
    validation: np.ndarray
    files: int

    def identity(self) -> dict[str, Any]:
        """Returns the sizes, and the SHA-256 of the training bytes followed by the others."""
        digest = hashlib.sha256(self.train)
        digest.update(self.validation)
        return {
            "files": self.files,
            "train_bytes": self.train.size,
            "validation_bytes": self.validation.size,
            "sha256": digest.hexdigest(),
        }


def read_text(folder: Path | None = None) -> Text:
    """Returns the Python files below a folder, tests left out, in the order of their paths.

    Every tenth file is for validation.

    Args:
        folder: pass None for the standard library.

    Raises:
        FileNotFoundError: the folder has fewer than two files.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*.py")
        if not _LEFT_OUT & {*path.relative_to(folder).parts}
    )
    if len(files) < 2:
        raise FileNotFoundError(
            f"{folder} has {len(files)} Python files, and training and validation need at least"
            " one each: install the sources of the standard library"
        )
    contents = [(folder / file).read_bytes() for file in files]
    train = b"".join(text for i, text in enumerate(contents) if i % _VALIDATION_EVERY)
    validation = b"".join(contents[::_VALIDATION_EVERY])
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8), len(files))
