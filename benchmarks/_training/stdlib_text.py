"""Text that every machine has: the source of Python's standard library."""

import platform
import sysconfig
from pathlib import Path

import numpy as np

from benchmarks._training.text import Text

_VALIDATION_EVERY = 10  # files
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}  # folders


def read_text(folder: Path | None = None) -> Text:
    """Returns the Python files below a folder, tests left out, in the order of their paths.

    Every tenth file is for validation. Each byte is a token.

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
    return Text(
        np.frombuffer(train, np.uint8),
        np.frombuffer(validation, np.uint8),
        files=len(files),
        vocabulary=256,
        name=f"Python {platform.python_version()}, folder {folder.name}",
        validation_bytes=len(validation),
    )
