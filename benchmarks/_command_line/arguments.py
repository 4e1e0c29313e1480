"""Arguments of several commands: the file that is written, and `--quick`."""

import argparse
from pathlib import Path

# Stands in the heading and in the file, so that nobody takes the numbers for a record.
_QUICK = "few cases in few rounds: no record"


def add_json(command: argparse.ArgumentParser, text: str) -> None:
    """Adds `--json`, a file that is written; `text` is its help."""
    command.add_argument("--json", type=writable_file, help=text)


def add_quick(command: argparse.ArgumentParser) -> None:
    """Adds `--quick`."""
    command.add_argument(
        "--quick",
        action="store_true",
        help="few cases in few rounds, to see that all runs; other flags still count",
    )


def quick_facts(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the entry of a report that says that it is a quick one; none where it is not."""
    return {"quick": _QUICK} if arguments.quick else {}


def writable_file(text: str) -> Path:
    """Returns the path of a file that can be made: hours of measurements end in it.

    Raises:
        argparse.ArgumentTypeError: the folder does not exist, or the path is a folder, a pipe
            or a device.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"the folder of {text!r} does not exist: make {str(path.parent)!r} first"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: pass a file in it")
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is a pipe or a device: pass a file")
    return path
