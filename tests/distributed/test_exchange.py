"""Where pieces lie in what is exchanged."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from muon_jax._exchange import _write
from muon_jax._placement import Chunk


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(1, 8), st.lists(st.integers(0, 17), min_size=1, max_size=4), st.data()
)
def test_units_are_written_to_their_owners_slots(owners, counts, data):
    first, column, size = data.draw(st.integers(0, owners - 1)), 5, 3
    count = sum(counts)
    chunk = Chunk((), -(-count // owners), first)
    packed = jnp.zeros((owners, column + chunk.slots * size))
    units = np.arange(1, 1 + count * size, dtype=np.float32).reshape(count, size)
    begin = 0
    for part in np.split(units, np.cumsum(counts)[:-1]):
        packed = _write(packed, chunk, column, begin, jnp.asarray(part))
        begin += len(part)
    expected = np.zeros((owners, chunk.slots, size), np.float32)
    for q, unit in enumerate(units):
        expected[(first + q) % owners, q // owners] = unit
    np.testing.assert_array_equal(packed[:, column:], expected.reshape(owners, -1))
    assert not packed[:, :column].any()
