"""Tables of text, for people."""

from collections.abc import Iterable, Sequence


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a line for the heading and one for each row, columns side by side."""
    rows = [heading, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
