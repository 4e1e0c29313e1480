"""Which code this is, for the cache of compiled programs."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path

import pallas_kernels

_PACKAGES = (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent)


@functools.cache
def code_id() -> str:
    """Returns what differs where the code that makes programs does.

    That is the version and the tables of measured times, which `pallas_kernels.tune` writes. Where
    the package is not installed, or is editable, the version says nothing: there it is a digest.
    """
    found = hashlib.sha256(_installed_version().encode())
    for root in _PACKAGES:
        sources = [] if _installed_version() else root.rglob("*.py")
        for path in sorted([*sources, *root.glob("tuned/*.json")]):
            found.update(path.read_bytes())
    return found.hexdigest()


def _installed_version() -> str:
    """The version of the distribution that this code is of, empty where there is none."""
    try:
        distribution = importlib.metadata.distribution("muon-jax")
    except importlib.metadata.PackageNotFoundError:
        return ""
    installed = Path(str(distribution.locate_file(_PACKAGES[0].name)))
    return distribution.version if installed.resolve() == _PACKAGES[0].resolve() else ""
