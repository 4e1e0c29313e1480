"""Where pieces lie in what is exchanged, and that nothing is lost on the way."""

import re

import chex
import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from muon_jax import muon, scale_by_muon
from muon_jax._distributed.packing import write_units
from muon_jax._iteration.newton_schulz import NewtonSchulz


@pytest.mark.parametrize("examples", helpers.mostly_nightly([3, 10], [3]))
def test_units_are_written_to_their_owners_slots(examples):
    given = hypothesis.given(
        st.integers(1, 8), st.lists(st.integers(0, 17), min_size=1, max_size=4), st.data()
    )
    settings = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True)
    settings(given(assert_units_are_written))()


def assert_units_are_written(owners, counts, data):
    first, block = data.draw(st.integers(0, owners - 1)), data.draw(st.sampled_from([1, 3]))
    column, size = 5 * block, 3
    count = sum(counts)
    slots = -(-count // owners)
    packed = jnp.zeros((owners, (column + slots * size) // block, block))
    units = np.arange(1, 1 + count * size, dtype=np.float32).reshape(count, size)
    begin = 0
    for part in np.split(units, np.cumsum(counts)[:-1]):
        packed = write_units(packed, first, column, begin, jnp.asarray(part))
        begin += len(part)
    expected = np.zeros((owners, slots, size), np.float32)
    for q, unit in enumerate(units):
        expected[(first + q) % owners, q // owners] = unit
    packed = packed.reshape(owners, -1)
    np.testing.assert_array_equal(packed[:, column:], expected.reshape(owners, -1))
    assert not packed[:, :column].any()


@pytest.mark.parametrize("dtype", helpers.mostly_nightly(["float16", "bfloat16"], ["float16"]))
def test_matrices_come_as_they_would_be_on_one_device_bit_for_bit(dtype, monkeypatch):
    """Where entries are small as well, in float16 subnormal, on a device that has no large ones."""
    monkeypatch.setattr(NewtonSchulz, "iterate", lambda self, x, *args: x)
    exponents = jax.random.randint(jax.random.key(1), (2, 16, 72), -45, 0)
    x = jnp.ldexp(jax.random.normal(jax.random.key(0), exponents.shape), exponents)
    sharding = NamedSharding(jax.make_mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    grads = {"one": x[0], "other": x[1].at[:2].set(1e-3 * x[1, :2])}
    sharded = {name: jax.device_put(g, sharding) for name, g in grads.items()}
    optimizer = muon(0.02, ns_coeffs=NewtonSchulz(dtype=dtype))

    def update(grads):
        return jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)[0]

    chex.assert_trees_all_equal(update(sharded), update(grads))
    jax.clear_caches()  # of what is no iteration


@pytest.mark.parametrize("dtype", helpers.mostly_nightly(["float16", "bfloat16"], ["float16"]))
def test_the_largest_numbers_are_not_rounded_to_infinities(dtype):
    x = jnp.sign(jax.random.normal(jax.random.key(0), (16, 72))) * jnp.finfo(jnp.float32).max
    sharding = NamedSharding(jax.make_mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    arguments = {"beta": 0.0, "nesterov": False, "dtype": dtype}
    _, updates = helpers.compiled_update({"x": jax.device_put(x, sharding)}, **arguments)
    assert jnp.isfinite(updates["x"]).all()
    chex.assert_trees_all_equal(updates, helpers.on_one_device({"x": x}, **arguments))


@pytest.mark.parametrize(
    ("shape", "wire"),
    [((64, 64), (8, 4, 128)), ((64, 72), (8, 9, 64)), ((24, 40), (8, 120))],
    ids=str,
)
def test_elements_are_exchanged_in_blocks(shape, wire):
    """TPUs' compiler takes minutes to reshape large arrays that have none."""
    sharding = NamedSharding(jax.make_mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}
    optimizer = scale_by_muon(ns_coeffs=NewtonSchulz(dtype="bfloat16"))
    state = jax.eval_shape(optimizer.init, grads)
    text = jax.jit(optimizer.update).trace(grads, state).lower().as_text()
    operand = "x".join(map(str, (*wire, "bf16")))
    exchanged = re.findall(r"all_to_all.*\(tensor<(\w+)>\) ->", text)
    assert exchanged == [operand] * 2
