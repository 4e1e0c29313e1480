"""The text of the training benchmark: files of an archive, their tokens, and the file of those."""

import hashlib
import io
import json
import lzma
import tarfile

import numpy as np
import pytest
import tokenizers

from benchmarks import __main__ as benchmarks
from benchmarks._training import corpus, corpus_command
from benchmarks._training.corpus import (
    END_OF_TEXT,
    VOCABULARY,
    make_corpus,
    read_corpus,
    train_tokenizer,
    write_corpus,
)
from benchmarks._training.linux_sources import LINUX, SourcePackage, read_sources

TAKEN = {f"kernel/f{i}.c": f"int f{i}(void)\n{{\n\treturn {i * i}; // ä\n}}\n" for i in range(97)}
TAKEN |= {"mm/Kconfig": "config MMU\n", "arch/x86/lib/a.S": "ret\n", "Documentation/b.rst": "B\n"}
PACKAGE = SourcePackage("Tiny 1", "tiny 1-1", "0" * 64, "0" * 64, "0.1.2")
LEFT_OUT = {
    "kernel/copy.c": TAKEN["kernel/f7.c"],
    "kernel/empty.c": "",
    "kernel/large.c": "x" * 200_001,
    "kernel/table.json": "{}",
    "mm/Kconfig.debug": "config DEBUG\n",
    "arch/mips/c.c": "mips\n",
    "drivers/gpu/drm/amd/include/registers.h": "#define A 1\n",
    "drivers/usb2/d.c": "usb2\n",
}


def write_archive(path, files):
    """Returns a package of that archive."""
    with tarfile.open(path, "w:xz", preset=0) as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"linux-source-6.1/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("linux-source-6.1/kernel/link.c")
        link.type, link.linkname = tarfile.SYMTYPE, "f1.c"
        tar.addfile(link)
    return PACKAGE._replace(sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "linux-source-6.1.tar.xz"
    return read_sources(path, write_archive(path, TAKEN | LEFT_OUT))


@pytest.fixture(scope="module")
def text(sources):
    with pytest.raises(ValueError) as refused:
        make_corpus(sources, PACKAGE)
    words = str(refused.value)
    found = words.split("got ")[1].split()[0]
    assert f"must be {'0' * 64}, got {found} with tokenizers {tokenizers.__version__}" in words
    assert "pip install tokenizers==0.1.2" in words
    return make_corpus(sources, PACKAGE._replace(tokens_sha256=found))


def test_the_command_writes_the_tokens(text, tmp_path, monkeypatch, capsys):
    package = write_archive(tmp_path / "a", TAKEN)._replace(tokens_sha256=text.identity()["sha256"])
    monkeypatch.setattr(corpus_command, "LINUX", package)
    benchmarks.main(["corpus", str(tmp_path / "a"), "--output", str(tmp_path / "b")])
    assert read_corpus(tmp_path / "b").identity() == text.identity()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train: 98 files, ") and "vocabulary: 8192" in lines
    assert lines[-1] == f"{tmp_path / 'b'}: {(tmp_path / 'b').stat().st_size} bytes"


def test_files_are_split_by_the_hash_of_their_paths_and_none_is_in_both_parts(sources):
    paths = sorted(TAKEN, key=lambda path: hashlib.sha256(path.encode()).digest())
    assert sources.validation == [TAKEN[path] for path in paths[:2]]
    assert sources.train == [TAKEN[path] for path in paths[2:]]
    assert not {*sources.train} & {*sources.validation}


def test_another_archive_is_refused(tmp_path):
    path = tmp_path / "a.tar.xz"
    found = write_archive(path, TAKEN).sha256
    needed = f"must be {LINUX.sha256}, that of the .tar.xz in linux-source-6.1 6.1.192-2"
    with pytest.raises(ValueError, match=f"{needed}, got {found}: .*dpkg-deb -x"):
        benchmarks.main(["corpus", str(path), "--output", str(tmp_path / "b")])
    assert not (tmp_path / "b").exists()


def test_both_parts_need_a_file(tmp_path):
    package = write_archive(tmp_path / "a", {"kernel/a.c": "a"} | LEFT_OUT | {"kernel/copy.c": "a"})
    with pytest.raises(FileNotFoundError, match="has 1 text files"):
        read_sources(tmp_path / "a", package)


def test_tokens_decode_to_the_files(sources, text):
    tokenizer = train_tokenizer(sources.train)
    assert tokenizer.get_vocab_size() <= END_OF_TEXT
    for tokens, files in ((text.train, sources.train), (text.validation, sources.validation)):
        assert tokens.dtype == np.uint16 and tokens.max() == END_OF_TEXT == tokens[-1]
        parts = np.split(tokens, np.flatnonzero(tokens == END_OF_TEXT) + 1)[:-1]
        assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == files
        assert len(tokens) < sum(len(file.encode()) for file in files) / 2


def test_the_tokenizer_is_fitted_to_the_first_characters(sources, monkeypatch):
    monkeypatch.setattr(corpus, "_SAMPLE", 500)
    first = train_tokenizer(sources.train).to_str()
    assert first == train_tokenizer([*sources.train[:20], *sources.validation]).to_str()
    monkeypatch.setattr(corpus, "_SAMPLE", 5000)
    assert first != train_tokenizer(sources.train).to_str()


def test_identity(sources, text):
    assert text.identity() == {
        "name": "Tiny 1, tiny 1-1",
        "files": 100,
        "train_tokens": len(text.train),
        "validation_tokens": len(text.validation),
        "validation_bytes": len("".join(sources.validation).encode()),
        "vocabulary": VOCABULARY,
        "sha256": hashlib.sha256(text.train.tobytes() + text.validation.tobytes()).hexdigest(),
    }


def test_what_is_written_is_read(tmp_path, text):
    path = tmp_path / "tiny.tokens.xz"
    write_corpus(text, path)
    read = read_corpus(path)
    for written, found in zip(text, read, strict=True):
        np.testing.assert_array_equal(found, written)
    assert read.train.dtype == read.validation.dtype == np.uint16
    header, tokens = lzma.decompress(path.read_bytes()).split(b"\n", 1)
    assert json.loads(header) == text.identity()
    for contents, found in (
        (lzma.compress(header + b"\n" + tokens[:2] + tokens[:-2]), "must hold .*, got {"),
        (path.read_bytes()[:-40], "must be a file of tokens, got Compressed file ended"),
        (lzma.compress(b"int main"), "must be a file of tokens, got Expecting value"),
        (b"int main", "must be a file of tokens, got Input format not supported"),
    ):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match=f"{found}.*: make it with `python -m benchmarks"):
            read_corpus(path)
