"""Inputs, float64 oracles and error measures that several tests share."""

import functools
import inspect
import re
import socket
from collections.abc import Callable, Container, Iterable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

import muon_jax
from muon_jax import NewtonSchulz, _newton_schulz, contrib, muon, newton_schulz, scale_by_muon
from pallas_kernels import device, syrk, syrk_with_residual, syrkx
from pallas_kernels._mosaic_gpu.config import MosaicSyrkxConfig
from pallas_kernels._mosaic_gpu.products import syrkx as mosaic_gpu_syrkx
from pallas_kernels._triton import TritonConfig
from pallas_kernels._triton import syrkx as triton_syrkx

# Small enough for interpret mode to be quick, and several tiles in every direction.
INTERPRETED = TritonConfig(32, 32, 16, num_warps=4, num_stages=3)
INTERPRETED_MOSAIC = MosaicSyrkxConfig(tile_m=64, tile_n=64, num_stages=2)


class DescribedGPU(AbstractDevice):
    """A GPU of a compute capability, as a real one states it."""

    compute_capability: str


def gpu(capability: str, *fields: Any) -> DescribedGPU:
    """The GPU of that name and number of multiprocessors."""
    device = DescribedGPU(*fields, "gpu")
    object.__setattr__(device, "compute_capability", capability)
    return device


GPUS = {
    "A100": gpu("8.0", "NVIDIA A100", 108),
    "H200": gpu("9.0", "NVIDIA H200", 132),
    "B200": gpu("10.0", "NVIDIA B200", 148),
    "RTX 4090": gpu("8.9", "NVIDIA GeForce RTX 4090", 128),
    "RTX PRO 6000": gpu("12.0", "NVIDIA RTX PRO 6000", 188),
}
# Those that no kernel runs on, with the platform that they are lowered for.
OTHER_GPUS = {
    "V100": (AbstractDevice("Tesla V100-SXM2-16GB", 80, "gpu"), "cuda"),
    "T4": (AbstractDevice("Tesla T4", 40, "gpu"), "cuda"),
    "MI300X": (AbstractDevice("gfx942", 304, "gpu"), "rocm"),
}


slow, nightly = pytest.mark.slow, pytest.mark.nightly


FUNCTIONS = ("nanogpt", "adamuon", "muonh")  # of contrib, with the numbers of a published system


def any_muon(*args: Any, preset: Any = None, **arguments: Any):
    """`muon`, or the optimizer of contrib that has this name or these arguments."""
    if isinstance(preset, str) and preset in FUNCTIONS:
        return getattr(contrib, preset)(*args, **arguments)
    make = contrib.muonh if "adamh" in arguments else muon
    make = contrib.normuon if "normuon_b2" in arguments else make
    return make(*args, **arguments, **({} if preset is None else {"preset": preset}))


def arguments_of_functions():
    """The arguments of the systems that are functions of contrib: defaults that muon's are not."""
    found = {}
    for name in FUNCTIONS:
        ours = inspect.signature(muon).parameters
        for key, p in inspect.signature(getattr(contrib, name)).parameters.items():
            if key not in ours or p.default != ours[key].default:
                found.setdefault(name, {})[key] = p.default
    return found


def mostly_nightly(cases: Iterable, quick: Container, slower: Container = ()) -> list:
    """Cases of `parametrize`: quick ones, those marked slow, and others, marked nightly."""
    return [
        case if case in quick else pytest.param(case, marks=slow if case in slower else nightly)
        for case in cases
    ]


def mostly_slow(cases: Iterable, quick: Container) -> list:
    """Cases of `parametrize`: quick ones, and others, marked slow."""
    return mostly_nightly(cases, quick, [*cases])


def unjitted_newton_schulz(x, *args, **kwargs):
    """`newton_schulz` traced anew. JAX keeps what its own jit has traced."""
    traced_anew = inspect.unwrap(_newton_schulz.polar_factors)
    with mock.patch.object(_newton_schulz, "polar_factors", traced_anew):
        return newton_schulz(x, *args, **kwargs)


def exchanges(*args, **kwargs):
    """What `describe` says of the devices of a mesh."""
    found = muon_jax.describe(*args, **kwargs).exchanges
    assert found is not None
    return found


def described_gpu(name: str):
    """A context in which functions are traced and lowered for a GPU that is not there."""
    device = GPUS[name] if name in GPUS else OTHER_GPUS[name][0]
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def free_address() -> str:
    """The address of a port of this machine that nothing uses, for a coordinator of processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def random_tree(shapes: dict[str, tuple[int, ...]], seed: int, dtype=jnp.float32):
    """Standard normal arrays of these shapes, by name."""
    return {
        name: jnp.asarray(np.random.default_rng([seed, i]).standard_normal(shape), dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The tree of dicts whose paths are these names."""
    tree = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = leaf
    return tree


def flat(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def pasted(message: str, **names: Any) -> Any:
    """The call that an error for unknown roles says to pass."""
    (call,) = re.findall(r"or (by_role\(.*\)), with None", message)
    return eval(call, {**vars(muon_jax), **names})


def count_of_programs(jitted: Any) -> int:
    """How many programs a jitted function has compiled."""
    return jitted._cache_size()


def two_steps(
    ns_coeffs="standard",
    ns_steps=2,
    *,
    dtype="float32",
    method=None,
    max_group_bytes=None,
    **kwargs,
):
    """`scale_by_muon`, by default of two steps in float32."""
    attributes = {"method": method, "max_group_bytes": max_group_bytes}
    return scale_by_muon(NewtonSchulz(ns_coeffs, dtype=dtype, **attributes), ns_steps, **kwargs)


def compiled_update(grads, **kwargs):
    """An update of `two_steps`: compiled; its result."""
    optimizer = two_steps(**kwargs)
    state = optimizer.init(grads)
    compiled = jax.jit(optimizer.update).lower(grads, state).compile()
    updates, new_state = compiled(grads, state)
    for key, grad in grads.items():
        for array in (updates[key], new_state.mu[key]):
            assert array.sharding.is_equivalent_to(grad.sharding, grad.ndim), key
    return compiled, updates


def on_one_device(grads, **kwargs):
    """The updates of the same gradients, not sharded."""
    return compiled_update({k: jnp.asarray(np.asarray(v)) for k, v in grads.items()}, **kwargs)[1]


def assert_close(updates, expected, atol=2e-6):
    """Updates that are sums in another order."""
    for key, update in expected.items():
        np.testing.assert_allclose(updates[key], update, atol=atol, err_msg=key)


def _interpreted(
    syrkx,
    a_matrix,
    b_matrix=None,
    c_matrix=None,
    *,
    alpha: jax.typing.ArrayLike = 1.0,
    beta: Any = 0.0,
    diagonal: jax.typing.ArrayLike = 0.0,
    residual=False,
    **kwargs,
):
    cs, coefficients = _stated(c_matrix, alpha, beta, diagonal)
    results = syrkx(
        a_matrix,
        b_matrix,
        tuple(jnp.expand_dims(c, range(a_matrix.ndim - c.ndim)) for c in cs),
        coefficients,
        symmetrize_output=True,
        residual=residual,
        **kwargs,
    )
    return results if residual else results[0]


def interpreted_triton(*operands, config=INTERPRETED, **kwargs):
    """`syrkx(implementation="triton")`, run by the interpreter on the CPU."""
    return _interpreted(triton_syrkx, *operands, config=config, interpret=True, **kwargs)


def interpreted_mosaic(
    *operands, config=INTERPRETED_MOSAIC, num_programs=3, detect_races=False, **kwargs
):
    """`syrkx(implementation="mosaic_gpu")`, run by the interpreter on the CPU."""
    return _interpreted(
        mosaic_gpu_syrkx,
        *operands,
        config=config,
        num_programs=num_programs,
        interpret=plgpu.InterpretGPUParams(detect_races=detect_races),
        **kwargs,
    )


def found_races() -> bool:
    """Whether the interpreter of Mosaic GPU kernels has found races."""
    return bool(interpret_pallas_call.get_races().races_found)


def assert_races_are_found(run: Callable[[], Any]) -> None:
    """The interpreter raises an error for a race since JAX 0.12, and only reports it before."""
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        assert "RACE DETECTED" in str(error)
    else:
        assert found_races()


def _stated(c_matrix, alpha, beta, diagonal):
    """The addends and the coefficients as implementations take them."""
    cs, betas = ((), ()) if c_matrix is None else ((c_matrix,), (beta,))
    if isinstance(c_matrix, tuple):
        cs, betas = c_matrix, beta
    return cs, tuple(jnp.asarray(value, jnp.float32) for value in (alpha, diagonal, *betas))


def by_name(implementation: str):
    """`syrk` where B is None, else `syrkx`, with the arguments of `_interpreted`."""

    def function(a_matrix, b_matrix=None, c_matrix=None, *, residual=False, **kwargs):
        if residual:
            return syrk_with_residual(a_matrix, c_matrix, implementation=implementation, **kwargs)
        if b_matrix is None:
            return syrk(a_matrix, c_matrix, implementation=implementation, **kwargs)
        return syrkx(a_matrix, b_matrix, c_matrix, implementation=implementation, **kwargs)

    return function


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": by_name("xla"),
    "triton, interpreted": interpreted_triton,
    "triton": by_name("triton"),
    "mosaic_gpu, interpreted": interpreted_mosaic,
    "mosaic_gpu": by_name("mosaic_gpu"),
    "mosaic_gpu_mma": by_name("mosaic_gpu_mma"),
}
# Those of all tests, the widest last.
DTYPES = {
    name: (jnp.bfloat16, jnp.float16) + (() if "mosaic_gpu" in name else (jnp.float32,))
    for name in IMPLEMENTATIONS
}
needs_hopper = pytest.mark.skipif(not device.current().is_hopper, reason="needs a Hopper GPU")
MARKS = {
    "triton": [pytest.mark.gpu],
    "mosaic_gpu": [pytest.mark.gpu, needs_hopper],
    "mosaic_gpu_mma": [pytest.mark.gpu],
}
each_implementation = pytest.mark.parametrize(
    "implementation", [pytest.param(name, marks=MARKS.get(name, [])) for name in IMPLEMENTATIONS]
)
# An interpreter computes in float16 as it does in bfloat16.
each_implementation_and_dtype = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=[nightly]
            if "interpreted" in name and dtype == jnp.float16
            else MARKS.get(name, []),
            id=f"{name}-{dtype.__name__}",
        )
        for name in IMPLEMENTATIONS
        for dtype in DTYPES[name]
    ],
)


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> jax.Array:
    """Integers in [-2, 2], whose products and sums float32 holds exactly."""
    return jnp.asarray(rng.integers(-2, 3, shape), dtype)


def symmetric(x: jax.Array) -> jax.Array:
    """The lower triangle of `x`, mirrored."""
    lower = np.asarray(x)
    return jnp.asarray(np.tril(lower) + np.tril(lower, -1).mT)


def exact_syrkx(
    a_matrix,
    b_matrix=None,
    c_matrix=None,
    *,
    alpha: jax.typing.ArrayLike = 1.0,
    beta: Any = 0.0,
    diagonal: jax.typing.ArrayLike = 0.0,
):
    """alpha·A·Bᵀ + Σ beta·C + diagonal·I in float64, its lower triangle mirrored."""
    a_matrix = np.asarray(a_matrix, np.float64)
    b_matrix = a_matrix if b_matrix is None else np.asarray(b_matrix, np.float64)
    addends, (alpha, diagonal, *betas) = _stated(c_matrix, alpha, beta, diagonal)
    alpha, diagonal = (np.asarray(x, np.float64)[..., None, None] for x in (alpha, diagonal))
    total = alpha * (a_matrix @ b_matrix.mT) + diagonal * np.eye(a_matrix.shape[-2])
    for beta, addend in zip(betas, addends, strict=True):
        total = total + np.asarray(beta)[..., None, None] * np.asarray(addend, np.float64)
    return np.tril(total) + np.tril(total, -1).mT


def exact_newton_schulz(x, triples) -> np.ndarray:
    """X/‖X‖_F, then X <- aX + (bA + cA²)X with A = XXᵀ for each triple, in float64."""
    x = np.asarray(x, np.float64 if np.isrealobj(x) else np.complex128)
    x = x / np.linalg.norm(x, axis=(-2, -1), keepdims=True)
    for a, b, c in triples:
        gram = x @ x.conj().mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def relative_error(result, reference) -> float:
    """‖result - reference‖ / ‖reference‖ (Frobenius)."""
    reference = np.asarray(reference)
    result = np.asarray(result, reference.dtype)
    return float(np.linalg.norm(result - reference) / np.linalg.norm(reference))
