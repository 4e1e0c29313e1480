"""The sources of Linux as Debian ships them: which files are text, and which are held out."""

import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class SourcePackage(NamedTuple):
    """A package whose text every machine can have, and the tokens that it becomes.

    Attributes:
        contents: what the text is, with its version.
        name: of the package, with its version.
        sha256: of the archive `.tar.xz` in the package.
        tokens_sha256: of the tokens.
        tokenizers: the version of the library that made them.
    """

    contents: str
    name: str
    sha256: str
    tokens_sha256: str
    tokenizers: str


LINUX = SourcePackage(
    contents="Linux 6.1.192",
    name="linux-source-6.1 6.1.192-2",
    sha256="4d415b3d364834fd818270e88813e90323bbfce4f519a0e6bd4940ddcd7df693",
    tokens_sha256="9963f93f457909a447ad8787d5b80a11f3264f431103ba2ee0e5189291a2afc9",
    tokenizers="0.23.3",
)

_HELD_OUT_ONE_IN = 50  # files
_SUFFIXES = {".S", ".c", ".h", ".rst", ".txt"}
_NAMES = {"Kconfig", "Makefile"}
_LARGEST = 200_000  # bytes; larger files are mostly tables
# What all machines share, two architectures and some drivers: less than a third of all text.
_FOLDERS = """
    Documentation arch/arm64 arch/x86 block certs crypto fs include init io_uring ipc kernel lib mm
    net rust samples scripts security sound/core tools usr virt
    drivers/base drivers/block drivers/char drivers/md drivers/nvme drivers/pci drivers/usb
""".split()


class Sources(NamedTuple):
    """The texts of files, in the order of the SHA-256 of their paths."""

    train: list[str]
    validation: list[str]


def read_sources(archive: Path, package: SourcePackage) -> Sources:
    """Reads the text files of the archive, and holds one in 50 out, at least one.

    The order of the SHA-256 of the paths mixes the folders. The first files are held out. Of files
    with the same contents one is taken, so no file of one part is in the other.

    Args:
        archive: the `.tar.xz`.
        package: the one that holds the archive.

    Raises:
        ValueError: the archive has another SHA-256.
        FileNotFoundError: fewer than two files are text.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise ValueError(
            f"the SHA-256 of {archive} must be {package.sha256}, that of the .tar.xz in"
            f" {package.name}, got {found}: get that version, and unpack the .deb with"
            " `dpkg-deb -x`"
        )
    paths: dict[str, str] = {}
    for path, text in _texts(archive):
        paths.setdefault(text, path)
    texts = sorted(paths, key=lambda text: hashlib.sha256(paths[text].encode()).digest())
    if len(texts) < 2:
        raise FileNotFoundError(
            f"{archive} has {len(texts)} text files, and training and validation need at least one"
            " each"
        )
    held_out = -(-len(texts) // _HELD_OUT_ONE_IN)
    return Sources(texts[held_out:], texts[:held_out])


def _texts(archive: Path) -> Iterator[tuple[str, str]]:
    """Yields path and text of each file that is taken; the path is below the archive's folder."""
    with tarfile.open(archive, "r|xz") as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            file = tar.extractfile(member) if member.isfile() and _is_taken(path) else None
            if file is not None and 0 < member.size <= _LARGEST:
                yield str(path), file.read().decode()


def _is_taken(path: PurePosixPath) -> bool:
    """Whether the path is that of a text in one of the folders."""
    is_text = path.suffix in _SUFFIXES or path.name in _NAMES
    return is_text and any(path.is_relative_to(folder) for folder in _FOLDERS)
