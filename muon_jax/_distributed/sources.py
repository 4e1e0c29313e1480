"""Which code this is: a digest for the cache of compiled programs."""

import functools
import hashlib
from pathlib import Path

import pallas_kernels

_PACKAGES = (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent)
_NO_PART_OF_PROGRAMS = {"benchmarks", "docs"}


@functools.cache
def digest() -> str:
    """Returns a digest of all that decides a program: sources, and tables of measured times."""
    found = hashlib.sha256()
    for root in _PACKAGES:
        for path in sorted([*root.rglob("*.py"), *root.glob("tuned/*.json")]):
            if path.relative_to(root).parts[0] not in _NO_PART_OF_PROGRAMS:
                found.update(path.read_bytes())
    return found.hexdigest()
