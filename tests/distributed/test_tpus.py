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
from benchmarks._times.rivals import newton_schulz_in_optax
from benchmarks._tpu.described import (
    compiled_for,
    compiled_update,
    described_mesh,
    described_tree,
    exchanges,
    flops,
    has_float16,
    temp_bytes,
)
from benchmarks._tpu.layouts import layouts_on_pod
from muon_jax import MuonDimensionNumbers, muon, newton_schulz, scale_by_muon
from muon_jax._iteration.coefficients import DIVERGING, NAMED, SCHEDULES
from muon_jax.contrib import KeyHeads, adamuon, normuon, qk_clip, with_metrics

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("libtpu"), reason="needs the dependency group `tpu`"
    ),
    pytest.mark.slow,
    pytest.mark.optimized,
    pytest.mark.uncached,
]

MATRICES = MuonDimensionNumbers(-2, -1)
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "v5e:4x4", "v5p:2x2x4", "v6e:4x4") + (
    "v5e:8x8",
    "v5p:4x4x4",
    "v6e:8x8",
)
COMPOSED, NORMALIZED = (*SCHEDULES,), {"aol": "aol", "aol_nvidia": "aol"}
# Coefficients whose gram form needs the digits of float16, or more.
NO_GRAM_FORM = ("dion", "deepseek_v4")
# A recipe and a form that it has in bfloat16; those that diverge run in float32.
ITERATIONS = [
    *itertools.product([*NAMED, *COMPOSED], ["standard"]),
    *itertools.product([n for n in NAMED if n not in (*DIVERGING, *NO_GRAM_FORM)], ["gram"]),
]


def mostly_nightly(cases, slow):
    """Cases of several arguments, nightly but for those of `slow`."""
    return [pytest.param(*case, marks=[] if case in slow else helpers.nightly) for case in cases]


# What automatic axes exchange where nobody knows shardings: two all-to-alls for each stack of
# parameters whose paths differ in a number alone, and for each mesh axis.
UNKNOWN = {
    "replicated": {"all-gather": 4},
    "FSDP": {"all-to-all": 2 * 4},
    "TP + FSDP": {"all-to-all": 2 * 4 * 2},
    "EP": {},
    "stacked layers": {"all-to-all": 2 * 2 * 2},
}
LAYOUTS = layouts_on_pod(width=256)


def described(name, topology, axis_type):
    """Parameters on a described mesh, and their specs."""
    sizes, shapes, specs = LAYOUTS[name]
    return described_tree(shapes, specs, described_mesh(topology, sizes, axis_type)), specs


def counts(compiled):
    return {kind: count for kind, (count, _) in exchanges(compiled).items()}


@pytest.mark.parametrize(
    ("coefficients", "method"),
    mostly_nightly(ITERATIONS, [("standard", "standard"), ("balanced", "standard")]),
)
def test_the_iteration_compiles_without_float16(coefficients, method):
    mesh = described_mesh("v5e:1x1", {"x": 1}, AxisType.Auto)
    shape = {"w": (2, 128, 256)}
    x = described_tree(shape, {}, mesh)["w"]
    iteration = functools.partial(
        newton_schulz,
        ns_coeffs=coefficients,
        method=method,
        preconditioning=NORMALIZED.get(coefficients, "frobenius"),
    )
    compiled = compiled_for(iteration, x)
    assert not has_float16(compiled)
    # The steps and half a step of temporaries: X, its Gram matrix and a product of such.
    assert temp_bytes(compiled) <= 4 * 4 * math.prod(shape["w"])


@pytest.mark.parametrize("coefficients", NO_GRAM_FORM)
@helpers.nightly
def test_a_gram_form_that_bfloat16_would_spoil_is_refused(coefficients):
    mesh = described_mesh("v5e:1x1", {"x": 1}, AxisType.Auto)
    x = described_tree({"w": (2, 128, 256)}, {}, mesh)["w"]
    iteration = functools.partial(newton_schulz, ns_coeffs=coefficients, method="gram")
    with pytest.raises(ValueError, match=r"rounding XXᵀ to bfloat16 would show.*method='standard'"):
        compiled_for(iteration, x)
    assert not has_float16(compiled_for(functools.partial(iteration, dtype="float32"), x))


@pytest.mark.parametrize("preconditioning", ["spectral", "schatten", "aol"])
@helpers.nightly
def test_other_norms_compile(preconditioning):
    mesh = described_mesh("v5e:1x1", {"x": 1}, AxisType.Auto)
    x = described_tree({"w": (2, 128, 256)}, {}, mesh)["w"]
    iteration = functools.partial(newton_schulz, preconditioning=preconditioning)
    assert not has_float16(compiled_for(iteration, x))


@pytest.mark.parametrize("named", ["float16", "float32", "bfloat16"])
@helpers.nightly
def test_a_dtype_that_is_named_is_that_of_products(named):
    mesh = described_mesh("v5e:1x1", {"x": 1}, AxisType.Auto)
    x = described_tree({"w": (2, 128, 256)}, {}, mesh)["w"]
    iteration = functools.partial(newton_schulz, ns_coeffs="fast", dtype=named)
    assert has_float16(compiled_for(iteration, x)) == (named == "float16")


@pytest.mark.parametrize(
    ("coefficients", "expected"), [("standard", 1.29e11), ("balanced", 1.035e11)]
)
@helpers.nightly
def test_xla_computes_symmetric_products_in_full(coefficients, expected):
    mesh = described_mesh("v5e:1x1", {"x": 1}, AxisType.Auto)
    x = described_tree({"w": (4, 1024, 1024)}, {}, mesh)["w"]
    ours = compiled_for(functools.partial(newton_schulz, ns_coeffs=coefficients), x)
    assert flops(ours) == pytest.approx(expected, rel=0.01)
    rival = compiled_for(newton_schulz_in_optax, x)
    assert flops(rival) == pytest.approx(1.29e11, rel=0.01)


@pytest.mark.parametrize(
    ("topology", "name", "who_knows"),
    mostly_nightly(
        itertools.product(TOPOLOGIES, LAYOUTS, ["nobody", "shardings=", "types"]),
        [("v5e:2x2", "replicated", "nobody"), ("v5e:2x2", "TP + FSDP", "nobody")],
    ),
)
def test_updates_compile(topology, name, who_knows):
    axis_type = AxisType.Explicit if who_knows == "types" else AxisType.Auto
    params, specs = described(name, topology, axis_type)
    optimizer = muon(
        0.02,
        ns_steps=2,
        muon_weight_dimension_numbers=MATRICES,
        shardings=specs if who_knows == "shardings=" else None,
    )
    if who_knows == "nobody":
        with pytest.warns(UserWarning, match="the compiler for tpu devices") as warned:
            compiled = compiled_update(optimizer, params)
        assert len(warned) == 1
        found = counts(compiled)
        moves = found.pop("collective-permute", 0)  # of a stack that does not divide evenly
        assert moves <= 2 * len(params)
        # XLA may sum what many chips have none of, all stacks at once, in place of gathering it.
        is_summed = name == "replicated" and found == {"all-reduce": 1}
        assert is_summed or found == UNKNOWN[name]
    else:
        compiled = compiled_update(optimizer, params)
        is_exchanged = name not in ("replicated", "EP")
        assert counts(compiled) == ({"all-to-all": 2} if is_exchanged else {})
    assert not has_float16(compiled)
    matrices = sum(math.prod(x.shape) for x in params.values())
    most = 4 * 4 * matrices
    if who_knows == "nobody" and name == "replicated":
        chips = next(iter(params.values())).sharding.mesh.size
        most += 4 * matrices // 2 * chips  # whole stacks, of two layers and of zeros for each chip
    assert temp_bytes(compiled) <= most


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(normuon, normuon_b2=0.95),
        adamuon,
        functools.partial(muon, mu_dtype="bfloat16", mu_rounding="stochastic"),
        functools.partial(muon, ns_coeffs="balanced"),
        functools.partial(muon, preset="moonlight"),
        lambda _, **kwargs: with_metrics(scale_by_muon(**kwargs)),
    ],
    ids=["NorMuon", "AdaMuon", "stochastic rounding", "balanced", "moonlight", "metrics"],
)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@helpers.nightly
def test_variants_compile(make, axis_type):
    params, specs = described("FSDP", "v5e:2x2", axis_type)
    stated = specs if axis_type == AxisType.Auto else None
    optimizer = make(0.02, shardings=stated)
    compiled = compiled_update(optimizer, params)
    assert not has_float16(compiled)
    assert counts(compiled)["all-to-all"] >= 2


@helpers.nightly
def test_qk_clip_compiles():
    params, specs = described("FSDP", "v5e:2x2", AxisType.Auto)
    clip = qk_clip(100.0, {"/q$": KeyHeads(((64, 0.5),))})
    optimizer = optax.chain(muon(0.02, shardings=specs), clip)
    logits = {name: jnp.ones(4) for name in params if name.endswith("/q")}
    update = functools.partial(optimizer.update, max_logits=logits)
    clipped = optax.GradientTransformationExtraArgs(optimizer.init, update)
    assert counts(compiled_update(clipped, params))["all-to-all"] == 2


@helpers.nightly
def test_the_step_of_the_gpt_compiles():
    """Its state is made under `jit`, so that nobody knows the shardings."""
    options = gpt_flags.parse("--depth 2 --width 256 --heads 2 --mesh data=1".split())
    options.dtype = "bfloat16"
    sizes = dict.fromkeys(gpt_model.AXES, 1) | {"fsdp": 2, "tensor": 2}
    mesh = described_mesh("v5e:2x2", sizes, AxisType.Auto)
    init, _, train_step, _ = gpt.make_functions(options, gpt.make_optimizer(options))
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(init)
        shardings = gpt_model.shardings_of(shapes, mesh)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )
        replicated = NamedSharding(mesh, PartitionSpec())
        text = jax.ShapeDtypeStruct((100_000,), jnp.uint8, sharding=replicated)
        step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, replicated))
        with pytest.warns(UserWarning, match="the compiler for tpu devices"):
            compiled = step.lower(state, text).compile()
    assert not has_float16(compiled)
