"""The command `report`."""

import argparse
import json
from pathlib import Path

from benchmarks._records.figures import save_figure, write_figures
from benchmarks._records.pages import WHERE, write_pages
from benchmarks._records.plots import figure_of_reports
from benchmarks._records.tables import markdown


def add_report_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `report`."""
    command.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    command.add_argument(
        "--pages", type=Path, metavar="DIR", help="write a page for each file of results into DIR"
    )
    command.add_argument(
        "--figures", type=Path, metavar="DIR", help="draw the figures of the documents into DIR"
    )
    command.add_argument("--png", type=Path, help="also plot the files (needs matplotlib)")


def run_report(arguments: argparse.Namespace) -> None:
    """Prints reports as Markdown, plots them, or writes pages and figures of all results."""
    if arguments.figures:
        write_figures(arguments.figures)
    if arguments.pages:
        write_pages(arguments.pages)
    if arguments.figures or arguments.pages:
        return
    if not arguments.files:
        raise SystemExit(
            f"report needs files: pass some that the other commands wrote with --json. {WHERE}"
        )
    reports = [json.loads(file.read_text()) for file in arguments.files]
    print("\n\n".join(map(markdown, reports)))
    if arguments.png:
        save_figure(lambda: figure_of_reports(reports), arguments.png)
