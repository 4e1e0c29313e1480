"""Regular expressions of paths: the first that matches a path decides for it."""

import re
from collections.abc import Iterable, Sequence


def first_match(patterns: Iterable[str], path: str) -> str | None:
    """Returns the first pattern that matches a path (`re.search`), None if there is none."""
    return next((pattern for pattern in patterns if re.search(pattern, path)), None)


def check_each_decides(
    argument: str,
    patterns: Iterable[str],
    paths: Sequence[str],
    whose: str = "parameters",
    mend: str = "",
) -> None:
    """Raises ValueError unless each pattern is the first that matches some path.

    Args:
        argument: what has the patterns, for errors.
        patterns: regular expressions.
        paths: the paths that the patterns may decide for.
        whose: what has these paths, for errors.
        mend: what else the caller can do, for errors.
    """
    matching = {p: [path for path in paths if re.search(p, path)] for p in patterns}
    if idle := [pattern for pattern, matched in matching.items() if not matched]:
        example = f", such as {paths[0]!r}" if paths else ""
        raise ValueError(
            f"the patterns {idle} of {argument} match none of the {len(paths)} {whose}{example}:"
            f" describe(params) prints all paths{mend}"
        )
    first = {path: first_match(matching, path) for path in paths}
    for pattern, matched in matching.items():
        takers = [p for p in matching if p in {first[path] for path in matched}]
        if pattern in takers:
            continue
        left = {first[path] for path in paths if path not in matched}
        first_of_all = f"put {pattern!r} first, or " if left >= {*takers} else ""
        raise ValueError(
            f"{argument}[{pattern!r}] never decides: {', '.join(map(repr, takers))} before it"
            f" already {'match' if len(takers) > 1 else 'matches'} all that it matches, such as"
            f" {matched[0]!r}: {first_of_all}leave it out"
        )
