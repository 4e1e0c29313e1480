"""Arguments that are one of several names."""

from typing import Any, TypeAliasType, get_args


def check(name: str, value: Any, choices: TypeAliasType) -> None:
    """Raises ValueError unless `value` is one of `choices`, a type of literals."""
    names = get_args(choices.__value__)
    if value not in names:
        raise ValueError(f"{name} must be one of {names}, got {value!r}")
