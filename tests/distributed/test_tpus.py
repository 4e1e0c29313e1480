"""Programs compiled for TPUs that are not there: needs the dependency group `tpu`."""

import functools
import importlib.util
import itertools
import math

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gpt
import gpt_flags
import gpt_model
from muon_jax import MuonDimensionNumbers, muon, newton_schulz, scale_by_muon, with_metrics
from muon_jax._iteration.fitted import SCHEDULES
from muon_jax._iteration.published import DIVERGING, NAMED
from muon_jax.benchmarks._times.rivals import newton_schulz_in_optax
from muon_jax.benchmarks._tpu.described import (
    compiled_for,
    compiled_update,
    described_mesh,
    described_tree,
    exchanges,
    has_float16,
)

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("libtpu"), reason="needs the dependency group `tpu`"
    ),
    pytest.mark.slow,
    pytest.mark.optimized,
    pytest.mark.uncached,
]
