"""What an update needs: temporaries, equations and kernels for a tree of many leaves, no leaks."""

import gc
import re
import resource
from collections import Counter
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from muon_jax import NewtonSchulz, muon

SHAPES = ((16, 16), (16, 32), (32, 16), (8, 24), (16,), (32,))


def lowered_update(params, **kwargs):
    """An update of donated gradients and state, lowered."""
    optimizer = muon(0.02, **kwargs)
    state = jax.eval_shape(optimizer.init, params)
    return jax.jit(optimizer.update, donate_argnums=(0, 1)).lower(params, state, params)


def temporary_bytes(compiled):
    """The most that temporaries need at once, on one device."""
    return compiled.memory_analysis().temp_size_in_bytes


# Beside each: the bytes of temporaries over those of the matrices, in float32.
@pytest.mark.parametrize(
    ("kwargs", "shape", "most"),
    [
        ({}, (64, 256), 2),
        pytest.param({}, (128, 128), 3, marks=helpers.slow),
        pytest.param({"ns_coeffs": "balanced"}, (64, 256), 3, marks=helpers.slow),
        pytest.param({"ns_coeffs": "balanced"}, (128, 128), 7, marks=helpers.slow),
        pytest.param(
            {"ns_coeffs": NewtonSchulz(method="gram")}, (128, 128), 7, marks=helpers.nightly
        ),
        pytest.param(
            {"ns_coeffs": NewtonSchulz(dtype="float32")}, (128, 128), 4, marks=helpers.nightly
        ),
    ],
    ids=str,
)
def test_temporaries_of_a_group(kwargs, shape, most):
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(8)}
    compiled = lowered_update(params, **kwargs).compile()
    assert temporary_bytes(compiled) <= most * 8 * 4 * np.prod(shape)


@pytest.mark.parametrize("kind", helpers.mostly_nightly(["Auto", "Explicit"], (), ["Auto"]))
def test_temporaries_of_sharded_matrices(kind):
    """On each device, of the bytes that it has of the matrices."""
    mesh = jax.make_mesh((8,), ("fsdp",), (AxisType[kind],))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    matrix = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=sharding)
    compiled = lowered_update({f"w{i}": matrix for i in range(16)}).compile()
    assert temporary_bytes(compiled) <= 3 * 16 * 4 * 64 * 256 / 8


def tree_of(count):
    """The shapes of that many leaves, most of them matrices."""
    return {
        f"leaf {i}": jax.ShapeDtypeStruct(SHAPES[i % len(SHAPES)], jnp.float32)
        for i in range(count)
    }


@helpers.slow
def test_equations_grow_with_the_leaves():
    """A leaf more adds as many operations to a large tree as to a small tree."""
    operations = []
    for count in (18, 36, 72):
        text = lowered_update(tree_of(count)).as_text()
        operations.append(len(re.findall(r"= stablehlo\.| = call", text)))
    few, some, many = operations
    assert many - some <= 1.01 * 2 * (some - few) < 60 * 36


def kinds_of_kernels(count):
    """The fused computations of a compiled update, without the names in them."""
    shapes = [(16, 32), (32, 16)] * (count // 2)
    params = {f"w{i}": jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
    text = lowered_update(params).compile().as_text()
    kinds = Counter()
    for body in re.findall(r"^%fused_computation\S* .*?^}", text, re.MULTILINE | re.DOTALL):
        body = re.sub(r", (metadata|backend_config)=\{.*|%[\w.\-]+|param_[\d.]+", "", body)
        kinds[re.sub(rf"\[({count}|{count // 2})\b", "[stack", body)] += 1
    return kinds


@helpers.slow
def test_kernels_differ_in_nothing_but_their_operands():
    """XLA compiles equal kernels once. It must not see the place of a matrix in its stack."""
    few, many = kinds_of_kernels(12), kinds_of_kernels(24)
    assert many.total() - few.total() >= 3 * 12
    assert len(many) <= len(few) + 3


def resident_bytes():
    """The memory of this process that is not swapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@helpers.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the /proc of Linux")
def test_updates_leak_nothing():
    params = {f"w{i}": jnp.ones((16, 16)) for i in range(4)} | {"b": jnp.ones(16)}
    optimizer = muon(0.02)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    found = []
    for count in (100, 2000):
        for _ in range(count):
            params, state = step(params, state)
        jax.block_until_ready(params)
        gc.collect()
        found.append((len(jax.live_arrays()), helpers.count_of_programs(step), resident_bytes()))
    (arrays, programs, resident), (more_arrays, more_programs, more_resident) = found
    assert (more_arrays, more_programs) == (arrays, programs) and programs == 1
    assert more_resident < resident + 2**24
