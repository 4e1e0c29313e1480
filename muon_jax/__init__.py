"""The Muon optimizer for JAX.

Muon orthogonalizes the momentum of each weight matrix: it replaces M = UΣVᵀ by an approximation of
UVᵀ, computed by a few Newton–Schulz steps X <- (aI + bA + cA²)X with A = XXᵀ.

`muon` is the optimizer, a drop-in for `optax.contrib.muon`; `scale_by_muon` its transformation for
chains of one's own; `newton_schulz` the iteration alone.
"""

from optax.contrib import MuonDimensionNumbers

from muon_jax._describe import Description, describe
from muon_jax._muon import MuonState, muon, scale_by_muon
from muon_jax._newton_schulz import newton_schulz
from muon_jax._routing import by_role
from muon_jax._views import Split, Unfold

__all__ = [
    "Description",
    "MuonDimensionNumbers",
    "MuonState",
    "Split",
    "Unfold",
    "by_role",
    "describe",
    "muon",
    "newton_schulz",
    "scale_by_muon",
]
