"""The command `report`."""

import argparse
import json
from pathlib import Path

from benchmarks._records.headline import headline_figure
from benchmarks._records.pages import WHERE, write_pages
from benchmarks._records.plots import figure_of_reports
from benchmarks._records.tables import markdown


def add_report_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `report`."""
    command.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    command.add_argument(
        "--pages", type=Path, metavar="DIR", help="write a page for each file of results into DIR"
    )
    command.add_argument("--png", type=Path, help="also plot the files (needs matplotlib)")
    command.add_argument(
        "--headline", action="store_true", help="plot all files in one short figure"
    )


def run_report(arguments: argparse.Namespace) -> None:
    """Prints reports as Markdown, plots them, or writes the pages of all results."""
    if arguments.pages:
        return write_pages(arguments.pages)
    if not arguments.files:
        raise SystemExit(
            f"report needs files: pass some that the other commands wrote with --json. {WHERE}"
        )
    reports = [json.loads(file.read_text()) for file in arguments.files]
    print("\n\n".join(map(markdown, reports)))
    if arguments.png:
        plot = headline_figure if arguments.headline else figure_of_reports
        plot(reports).savefig(arguments.png, format="png", dpi=160)
