"""A text in tokens of a byte-level BPE, made of an archive of sources, and kept in one file.

The file is compressed with xz. Its first line is `Text.identity()` in JSON. The tokens follow, in
little-endian uint16, first those for training.
"""

import itertools
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks._command_line.progress import measure_each
from benchmarks._training.linux_sources import SourcePackage, Sources
from benchmarks._training.text import Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 8192
END_OF_TEXT = VOCABULARY - 1  # follows every file; the other tokens are those of the tokenizer
_SAMPLE = 25_000_000  # characters that the tokenizer is trained on
_BATCH = 256  # files that are encoded at once
_CHUNK = 1_000_000  # tokens that are compressed at once
# No token crosses these pieces: words with a character before them, digits, signs, and spaces.
# The pattern of cl100k_base (https://github.com/openai/tiktoken), without English contractions.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Similar files are far apart, so the dictionary holds all tokens. A token has 2 bytes.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 28, "lc": 3, "lp": 1, "pb": 1}]


def train_tokenizer(texts: Sequence[str]) -> "Tokenizer":
    """Returns a byte-level BPE of up to 8191 tokens, fitted to the first 25 million characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    ends = itertools.accumulate(map(len, texts))
    sample = [text for text, end in zip(texts, ends, strict=True) if end <= _SAMPLE] or texts[:1]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=END_OF_TEXT, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def make_corpus(sources: Sources, package: SourcePackage) -> Text:
    """Returns the tokens of both parts, by a tokenizer that is fitted to the part for training.

    Raises:
        ValueError: the tokens are not those of the package. Another version of tokenizers may fit
            another tokenizer.
    """
    import tokenizers

    tokenizer = train_tokenizer(sources.train)
    text = Text(
        _encode(tokenizer, sources.train, "training files"),
        _encode(tokenizer, sources.validation, "held-out files"),
        files=len(sources.train) + len(sources.validation),
        vocabulary=VOCABULARY,
        name=f"{package.contents}, {package.name}",
        validation_bytes=sum(len(text.encode()) for text in sources.validation),
    )
    found = text.identity()["sha256"]
    if found != package.tokens_sha256:
        raise ValueError(
            f"the SHA-256 of the tokens must be {package.tokens_sha256}, got {found} with"
            f" tokenizers {tokenizers.__version__}: pip install tokenizers=={package.tokenizers}"
        )
    return text


def write_corpus(text: Text, path: Path) -> None:
    """Writes the text to a file."""
    with lzma.open(path, "wb", filters=_FILTERS) as file:
        file.write(json.dumps(text.identity()).encode() + b"\n")
        chunks = [
            part[start : start + _CHUNK]
            for part in (text.train, text.validation)
            for start in range(0, part.size, _CHUNK)
        ]
        for _ in measure_each(chunks, file.write, lambda _: f"compress {path.name}"):
            pass


def read_corpus(path: Path) -> Text:
    """Returns the text that `write_corpus` wrote, tokens in uint16.

    Raises:
        ValueError: the file is another one, or its tokens are not those of its first line.
    """
    remedy = "make it with `python -m benchmarks corpus`"
    try:
        with lzma.open(path) as file:
            identity = json.loads(file.readline())
            tokens = np.frombuffer(file.read(), "<u2")
    except (EOFError, ValueError, lzma.LZMAError) as error:
        raise ValueError(f"{path} must be a file of tokens, got {error}: {remedy}") from error
    train, validation = np.split(tokens, [identity["train_tokens"]])
    facts = (identity[key] for key in ("files", "vocabulary", "name", "validation_bytes"))
    text = Text(train, validation, *facts)
    if text.identity() != identity:
        raise ValueError(f"{path} must hold {identity}, got {text.identity()}: {remedy}")
    return text


def _encode(tokenizer: "Tokenizer", texts: list[str], label: str) -> np.ndarray:
    """Returns the tokens of all texts, each followed by the end of text, in uint16."""

    def tokens_of(batch: tuple[str, ...]) -> np.ndarray:
        encoded = tokenizer.encode_batch_fast(batch)
        return np.concatenate([np.array([*one.ids, END_OF_TEXT], "<u2") for one in encoded])

    batches = itertools.batched(texts, _BATCH)
    return np.concatenate([*measure_each(batches, tokens_of, lambda _: f"encode {label}")])
