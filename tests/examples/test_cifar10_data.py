"""The loader reads every form of the images, refuses what is damaged, and resumes downloads."""

import hashlib
import http.server
import io
import pickle
import re
import shutil
import struct
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

import cifar10_data

RECORDS = 20  # in each file


class Python2Pickler(pickle._Pickler):  # pyright: ignore
    """Writes strings of bytes and arrays as Python 2 and its numpy did."""

    dispatch = dict(pickle._Pickler.dispatch)  # pyright: ignore

    def save_bytes(self, data):
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)

    dispatch[bytes] = save_bytes

    def reducer_override(self, value):
        if isinstance(value, np.dtype):
            return np.dtype, (value.str[1:].encode(), 0, 1), (3, b"|", None, None, None, -1, -1, 0)
        return NotImplemented


def pickled(batch) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(batch)
    return file.getvalue().replace(b"numpy._core.", b"numpy.core.")


def write(folder: Path, form: str) -> Path:
    """Writes the six files, the same images in every form."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in cifar10_data.BATCHES:
        labels = rng.integers(0, 10, (RECORDS, 1), np.uint8)
        pixels = rng.integers(0, 256, (RECORDS, 3072), np.uint8)
        pixels //= 1 + labels  # something to learn: the brightness
        if form == "binary":
            (folder / f"{name}.bin").write_bytes(np.hstack([labels, pixels]).tobytes())
        else:
            batch = {b"batch_label": name.encode(), b"labels": labels[:, 0].tolist()}
            (folder / name).write_bytes(pickled(batch | {b"data": pixels}))
    (folder / "batches.meta.txt").write_text("airplane\n")
    return folder


def archive(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w:gz") as file:
        file.add(folder, folder.name)
    return path


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    return write(tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin", "binary")


@pytest.fixture
def pickles(tmp_path):
    return write(tmp_path / "cifar-10-batches-py", "pickled")


@pytest.fixture
def copy(binary, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(binary, tmp_path / "copy"))


def test_a_record_is_a_label_and_three_planes(binary):
    data = cifar10_data.load(binary)
    assert data.images.shape == (5 * RECORDS, 32, 32, 3) and data.images.dtype == np.uint8
    assert data.test_images.shape == (RECORDS, 32, 32, 3)
    record = (binary / "data_batch_2.bin").read_bytes()[3 * 3073 : 4 * 3073]
    assert data.labels[RECORDS + 3] == record[0]
    row, column, color = 5, 7, 2
    pixel = record[1 + 1024 * color + 32 * row + column]
    assert data.images[RECORDS + 3, row, column, color] == pixel


def test_all_forms_hold_the_same(binary, pickles, tmp_path, monkeypatch):
    expected = cifar10_data.load(binary)
    monkeypatch.setenv("CIFAR10_DIR", str(pickles))
    in_a_folder = tmp_path / "downloads" / cifar10_data.ARCHIVES[1]
    in_a_folder.parent.mkdir()
    sources = (
        None,
        binary.parent,
        pickles.parent,
        archive(binary, tmp_path / "binary.tar.gz"),
        archive(pickles, in_a_folder),
        in_a_folder.parent,
    )
    for source in sources:
        for a, b in zip(expected, cifar10_data.load(source), strict=True):
            np.testing.assert_equal(a, b)


def test_digests_are_of_the_records(binary, pickles):
    for source in (binary, pickles):
        assert cifar10_data.load(source).digests == {
            name: hashlib.sha256((binary / f"{name}.bin").read_bytes()).hexdigest()
            for name in cifar10_data.BATCHES
        }


def test_what_is_not_there_is_said(copy, tmp_path):
    (copy / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"copy lacks data_batch_3\.bin, needed"):
        cifar10_data.load(copy)
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_1, data_batch_2, .*CIFAR10_DIR"):
        cifar10_data.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"elsewhere does not exist: set CIFAR10_DIR"):
        cifar10_data.load(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" * 3074, r"test_batch\.bin has 3074 bytes, needed is a multiple of 3073"),
        (b"", r"test_batch\.bin has 0 bytes"),
        (b"\x0b" + b"\0" * 3072, r"test_batch\.bin has a label 11, needed are labels below 10"),
    ],
)
def test_damaged_records_are_refused(content, message, copy):
    (copy / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        cifar10_data.load(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(print, 2), r"test_batch is not .* \(it asks for __builtin__\.print\)"),
        (
            pickled({b"labels": [1], b"data": np.zeros((1, 3072), np.float32)}),
            r"it holds an array of dtype b'f4'",
        ),
        (pickled({b"labels": [1, 2], b"data": np.zeros((1, 3072), np.uint8)}), "must match"),
        (b"\x80\x02}", "needed is a dictionary"),
    ],
)
def test_other_pickles_are_refused(content, message, pickles):
    (pickles / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        cifar10_data.load(pickles)


def test_damaged_archives_are_refused(binary, tmp_path):
    whole = archive(binary, tmp_path / "whole.tar.gz").read_bytes()
    cut = tmp_path / "cut.tar.gz"
    for content in (whole[: len(whole) // 2], b"not an archive"):
        cut.write_bytes(content)
        with pytest.raises(ValueError, match=r"cut\.tar\.gz is not a whole archive"):
            cifar10_data.load(cut)


class Server(http.server.ThreadingHTTPServer):
    """Serves bytes, or ranges of them, and hangs up after `limit` bytes."""

    content: bytes
    limit: int
    ranges: list[str | None]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self):
        content = self.server.content
        wanted = self.headers["Range"]
        self.server.ranges.append(wanted)
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if begin >= len(content):
            return self.send_error(416)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        self.wfile.write(content[begin : begin + self.server.limit])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server(binary, tmp_path):
    with Server(("127.0.0.1", 0), Handler) as server:
        server.content = archive(binary, tmp_path / "served.tar.gz").read_bytes()
        server.limit, server.ranges = len(server.content), []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def download(server, folder, md5=None):
    url = f"http://127.0.0.1:{server.server_port}/cifar-10-binary.tar.gz"
    md5 = md5 or hashlib.md5(server.content).hexdigest()
    return cifar10_data.download(folder, url, md5)


def test_a_download_goes_on_where_it_broke_off(server, tmp_path):
    size = server.limit = 1 + len(server.content) // 3
    path = download(server, tmp_path / "new" / "folder")
    assert server.ranges == [None, f"bytes={size}-", f"bytes={2 * size}-"]
    assert path.read_bytes() == server.content
    assert [file.name for file in path.parent.iterdir()] == ["cifar-10-binary.tar.gz"]
    assert download(server, path.parent) == path and len(server.ranges) == 3  # it is there


def test_a_later_call_goes_on_too(server, tmp_path):
    partial = tmp_path / "cifar-10-binary.tar.gz.part"
    partial.write_bytes(server.content[:1000])
    server.limit = 0
    with pytest.raises(OSError, match=r"could not download http.* early; .*part has 1000 bytes"):
        download(server, tmp_path)
    assert partial.stat().st_size == 1000
    server.limit = len(server.content)
    assert download(server, tmp_path).read_bytes() == server.content
    assert server.ranges == ["bytes=1000-", "bytes=1000-"]


def test_no_server(server, tmp_path):
    with pytest.raises(OSError, match=r"could not download .*refused.*set CIFAR10_DIR"):
        cifar10_data.download(tmp_path, "http://127.0.0.1:9/cifar-10-binary.tar.gz")


@pytest.mark.parametrize("name", ["cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz.part"])
def test_a_wrong_checksum_deletes_nothing(name, server, tmp_path):
    (tmp_path / name).write_bytes(b"x" * (len(server.content) + 1))
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has the MD5 \w+, needed is c32a"):
        download(server, tmp_path, cifar10_data.MD5)
    assert (tmp_path / name).stat().st_size == len(server.content) + 1
