"""The Muon optimizer for JAX.

Muon orthogonalizes the momentum of each weight matrix: it replaces M = UΣVᵀ by an approximation of
UVᵀ, computed by a few Newton–Schulz steps X <- (aI + bA + cA²)X with A = XXᵀ.

`muon` is the optimizer, a drop-in for `optax.contrib.muon`; `scale_by_muon` its transformation for
chains of one's own; `newton_schulz` the iteration alone, and `NewtonSchulz` its coefficients and
how its products run. `PRESETS` holds the arguments of `muon` that make it other published Muons;
`describe` says what will become of each parameter, and `Exchange` sets what devices exchange.
`muon_jax.contrib` has what most users never need.
"""

import importlib.metadata

from optax.contrib import MuonDimensionNumbers

from muon_jax._by_use.by_use import Routes, by_use
from muon_jax._distributed.cost import Link
from muon_jax._distributed.exchange import Exchange
from muon_jax._distributed.state_shardings import state_shardings
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._matrices.by_role import by_role
from muon_jax._matrices.views import Split, Unfold
from muon_jax._muon import muon
from muon_jax._newton_schulz import newton_schulz
from muon_jax._presets import PRESETS
from muon_jax._reports.describe import Description, describe
from muon_jax._scale_by_muon import scale_by_muon
from muon_jax._transforms.chain import Relative
from muon_jax._transforms.momentum import MuonState

__all__ = [
    "PRESETS",
    "Description",
    "Exchange",
    "Link",
    "MuonDimensionNumbers",
    "MuonState",
    "NewtonSchulz",
    "Relative",
    "Routes",
    "Split",
    "Unfold",
    "by_role",
    "by_use",
    "describe",
    "muon",
    "newton_schulz",
    "scale_by_muon",
    "state_shardings",
]

# The version of the distribution that is installed. As in JAX, `__all__` leaves it out. A source
# tree that is not installed has no metadata, and so no version that can be known.
try:
    __version__ = importlib.metadata.version("muon-jax")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0+unknown"

# Pickles and error messages name what is public by this package, not by the room it lies in.
for _public in (globals()[name] for name in __all__):
    if getattr(_public, "__module__", "").startswith(f"{__name__}."):
        _public.__module__ = __name__
