"""The Muon optimizer for JAX.

Muon orthogonalizes the momentum of each weight matrix: it replaces M = UΣVᵀ by an approximation of
UVᵀ, computed by a few Newton–Schulz steps X <- (aI + bA + cA²)X with A = XXᵀ.

`muon` is the optimizer, a drop-in for `optax.contrib.muon`; `scale_by_muon` its transformation for
chains of one's own; `newton_schulz` the iteration alone; `explain` tells who orthogonalizes what
where parameters are sharded.
"""

from optax.contrib import MuonDimensionNumbers

from muon_jax._explain import Explanation, explain
from muon_jax._muon import MuonState, muon, scale_by_muon
from muon_jax._newton_schulz import newton_schulz

__all__ = [
    "Explanation",
    "MuonDimensionNumbers",
    "MuonState",
    "explain",
    "muon",
    "newton_schulz",
    "scale_by_muon",
]
