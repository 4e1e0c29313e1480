"""CIFAR-10 (Krizhevsky, 2009) from local files, or from where its author publishes it.

The data set is six files of records, in one of two forms: binary (`data_batch_1.bin`, a byte of
label and 3072 of pixels a record) or pickled by Python 2 (`data_batch_1`), each in a folder or in
an archive. All are read in memory, and nothing but numbers comes out of a pickle. Files in either
form may hold any number of records.
"""

import hashlib
import http.client
import io
import os
import pickle
import re
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")

# The files of the data set, and the SHA-256 of the records of each in the binary form.
BATCHES = {
    "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
RECORD = 1 + 3 * 32 * 32  # bytes: the label, then red, green and blue, row by row


class Cifar10(NamedTuple):
    """Images `(n, 32, 32, 3)` and labels `(n,)`, uint8, and the SHA-256 of each batch."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    digests: dict[str, str]


def load(source: str | os.PathLike[str] | None = None) -> Cifar10:
    """Returns the data set, from a folder, from an archive or downloaded.

    Args:
        source: an archive, or a folder that holds the six files, the folder of them as it is
            unpacked, or an archive; None for the one in the environment variable `CIFAR10_DIR`,
            and where that is not set, for `~/.cache/cifar-10`, into which it is downloaded.

    Raises:
        FileNotFoundError: the source, or a file of the data set in it, is missing.
        ValueError: a file is not in CIFAR-10's format, or a download has the wrong checksum.
        OSError: the download failed.
    """
    source = source or os.environ.get("CIFAR10_DIR")
    path = Path(source) if source else download(Path.home() / ".cache" / "cifar-10")
    files = _files(path)
    form = ".bin" if "test_batch.bin" in files else ""
    missing = [name + form for name in BATCHES if name + form not in files]
    if missing:
        raise FileNotFoundError(
            f"{path} lacks {', '.join(missing)}, needed are data_batch_1 to data_batch_5 and"
            f" test_batch, all with .bin or all without: unpack {URL} there, or set CIFAR10_DIR to"
            " a folder that holds them"
        )
    read = _binary if form else _pickled
    records = [read(files[name + form](), str(path / (name + form))) for name in BATCHES]
    digests = [hashlib.sha256(batch).hexdigest() for batch in records]
    train, test = _arrays(np.concatenate(records[:-1])), _arrays(records[-1])
    return Cifar10(*train, *test, dict(zip(BATCHES, digests, strict=True)))


def download(folder: Path, url: str = URL, md5: str = MD5) -> Path:
    """Returns the path of the archive in the folder, after downloading it if it is not there.

    A download that breaks off goes on where it stopped, in the same call while bytes arrive, later
    in the next one: until its checksum is verified the file ends in `.part`.

    Raises:
        OSError: the download failed.
        ValueError: the checksum is wrong. The file stays.
    """
    archive = folder / url.rpartition("/")[2]
    partial = archive.with_name(archive.name + ".part")
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial.touch()
        while True:
            size = partial.stat().st_size
            try:
                _fetch(url, partial)
                break
            except (OSError, http.client.HTTPException) as error:
                if partial.stat().st_size <= size:
                    raise OSError(
                        f"could not download {url}: {error}; {partial} has {size} bytes, which the"
                        " next call goes on from: try again with a network, or set CIFAR10_DIR to"
                        " a folder that holds the data set"
                    ) from error
    found = archive if archive.exists() else partial
    with found.open("rb") as file:
        digest = hashlib.file_digest(file, "md5").hexdigest()
    if digest != md5:
        raise ValueError(
            f"{found} has the MD5 {digest}, needed is {md5}, that of {url}: move the file away and"
            " download again, or set CIFAR10_DIR to it to use it as it is"
        )
    return found.rename(archive)


def _fetch(url: str, partial: Path) -> None:
    """Appends what is missing to the file."""
    start = partial.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing
        raise
    with response:
        resumes = response.status == http.HTTPStatus.PARTIAL_CONTENT
        with partial.open("ab" if resumes else "wb") as file:
            shutil.copyfileobj(response, file)
        if response.length:  # bytes that were announced and did not come
            raise ConnectionError(f"the connection broke off {response.length} bytes early")


def _files(path: Path) -> Mapping[str, Callable[[], bytes]]:
    """Returns what reads each file of a folder or an archive, by its name without folders."""
    if path.is_dir():
        files = {file.name: file.read_bytes for file in path.iterdir() if file.is_file()}
        if not {"test_batch", "test_batch.bin"} & files.keys():
            for inside in (path / name for name in (*FOLDERS, *ARCHIVES)):
                if inside.exists():
                    return _files(inside)
        return files
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: set CIFAR10_DIR to a folder that holds CIFAR-10, or unset it"
            " to download the data set"
        )
    try:
        with tarfile.open(path) as archive:
            contents = {  # read in the archive's order: to go back is to decompress anew
                Path(member.name).name: archive.extractfile(member).read()  # pyright: ignore
                for member in archive
                if member.isfile()
                and re.fullmatch(r"\w+_batch(_\d)?(\.bin)?", Path(member.name).name)
            }
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a whole archive ({error}): download {URL} again"
        ) from error
    return {name: (lambda data=data: data) for name, data in contents.items()}


def _binary(data: bytes, name: str) -> np.ndarray:
    """Returns the records `(n, 3073)` of a file in the binary form."""
    if not data or len(data) % RECORD:
        raise ValueError(
            f"{name} has {len(data)} bytes, needed is a multiple of {RECORD}, the size of a record:"
            " the file is cut off or is not CIFAR-10's; get it again"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    if (largest := records[:, 0].max()) >= len(CLASSES):
        raise ValueError(
            f"{name} has a label {largest}, needed are labels below {len(CLASSES)}: the file is not"
            " CIFAR-10's; CIFAR-100 has two labels a record"
        )
    return records


class _Unpickler(pickle.Unpickler):
    """Knows the names in CIFAR-10's files, uint8 arrays of numpy, and no other."""

    def find_class(self, module, name):
        match f"{module}.{name}":
            case "numpy.core.multiarray._reconstruct":
                return lambda *args: np.ndarray(0, np.uint8)  # its shape and data are set next
            case "numpy.ndarray":
                return np.ndarray
            case "numpy.dtype":
                return lambda name, *args: _uint8(name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _uint8(name: bytes) -> np.dtype:
    if name != b"u1":
        raise pickle.UnpicklingError(f"it holds an array of dtype {name!r}")
    return np.dtype(np.uint8)


def _pickled(data: bytes, name: str) -> np.ndarray:
    """Returns the records `(n, 3073)` of a pickle of Python 2."""
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        records = np.column_stack([np.array(batch[b"labels"], np.uint8), batch[b"data"]])
    except Exception as error:  # whatever a damaged pickle raises
        raise ValueError(
            f"{name} is not one of CIFAR-10's pickles ({error}): needed is a dictionary of"
            " b'labels', integers, and b'data', uint8 of shape (n, 3072); get the file again"
        ) from error
    return _binary(records.tobytes(), name)


def _arrays(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns images `(n, 32, 32, 3)` and labels `(n,)`."""
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0].copy()
