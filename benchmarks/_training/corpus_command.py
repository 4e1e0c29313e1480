"""The command `corpus`."""

import argparse
from pathlib import Path

from benchmarks._command_line.arguments import writable_file
from benchmarks._training.corpus import make_corpus, write_corpus
from benchmarks._training.linux_sources import LINUX, read_sources


def add_corpus_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `corpus`."""
    command.add_argument(
        "archive", type=Path, help=f"the .tar.xz of the Debian package {LINUX.name}"
    )
    command.add_argument(
        "--output", type=writable_file, required=True, help="write the tokens to this file"
    )


def run_corpus(arguments: argparse.Namespace) -> None:
    """Writes the tokens of the archive, and prints what they are.

    Raises:
        ValueError: the archive or the tokens are not the known ones.
    """
    sources = read_sources(arguments.archive, LINUX)
    for part, texts in sources._asdict().items():
        print(f"{part}: {len(texts)} files, {sum(map(len, texts))} characters", flush=True)
    text = make_corpus(sources, LINUX)
    write_corpus(text, arguments.output)
    for key, fact in text.identity().items():
        print(f"{key.replace('_', ' ')}: {fact}")
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")
