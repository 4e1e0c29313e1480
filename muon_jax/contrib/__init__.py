"""What most users of `muon_jax` never need: other Muons, smaller states, QK-clip and metrics."""

from muon_jax.contrib._adamuon import scale_by_adamuon
from muon_jax.contrib._attention_heads import KeyHeads, QueryHeads
from muon_jax.contrib._hyperp import hyperp_learning_rate
from muon_jax.contrib._metrics import MetricsState, metrics, with_metrics
from muon_jax.contrib._momentum import cast_momentum, convert_momentum
from muon_jax.contrib._normuon import NorMuonState, scale_by_normuon
from muon_jax.contrib._on_host import on_host
from muon_jax.contrib._optimizers import adamuon, muonh, nanogpt, normuon
from muon_jax.contrib._param_norm import keep_param_norm, scale_to_param_norm
from muon_jax.contrib._qk_clip import qk_clip
from muon_jax.contrib._quantized import Quantized

__all__ = [
    "KeyHeads",
    "MetricsState",
    "NorMuonState",
    "Quantized",
    "QueryHeads",
    "adamuon",
    "cast_momentum",
    "convert_momentum",
    "hyperp_learning_rate",
    "keep_param_norm",
    "metrics",
    "muonh",
    "nanogpt",
    "normuon",
    "on_host",
    "qk_clip",
    "scale_by_adamuon",
    "scale_by_normuon",
    "scale_to_param_norm",
    "with_metrics",
]

# As in `muon_jax`: pickles and error messages name what is public by this package.
for _public in (globals()[name] for name in __all__):
    _public.__module__ = __name__
