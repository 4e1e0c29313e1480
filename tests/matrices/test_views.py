"""Fused projections, heads and stacks as matrices, and back."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muon_jax import MuonDimensionNumbers, NewtonSchulz, Split, Unfold, muon, newton_schulz
from muon_jax._distributed.sharding import parameters_of
from muon_jax._matrices.views import MATRICES, from_stacks, to_stacks

HEADS = MuonDimensionNumbers(-3, -1)  # (…, rows, heads, cols): a matrix for each head
VIEWS = {
    "conv": ((3, 3, 4, 8), MuonDimensionNumbers((0, 1, 2), 3), [(1, 36, 8)]),
    "experts of layers": ((2, 3, 6, 4), MATRICES, [(6, 6, 4)]),
    "DenseGeneral": ((6, 2, 4), MuonDimensionNumbers(0, (1, 2)), [(1, 6, 8)]),
    "DenseGeneral out": ((2, 4, 6), MuonDimensionNumbers((0, 1), 2), [(1, 8, 6)]),
    "heads": ((6, 8), Unfold(1, (2, 4), HEADS), [(2, 6, 4)]),
    "heads of layers": ((5, 6, 8), Unfold(-1, (-1, 4), HEADS), [(10, 6, 4)]),
    "one view each": ((6, 10), Split(1, (4, 6), (MATRICES, MATRICES)), [(1, 6, 4), (1, 6, 6)]),
    "gate and up": ((6, 10), Split(1, (5, 5)), [(1, 6, 5)] * 2),
    "qkv of layers": ((2, 6, 16), Split(-1, (8, 4, 4)), [(2, 6, 8), (2, 6, 4), (2, 6, 4)]),
    "qkv in heads": (
        (6, 16),
        Split(-1, (8, 4, 4), Unfold(-1, (-1, 4), HEADS)),
        [(2, 6, 4), (1, 6, 4), (1, 6, 4)],
    ),
    "q, k, v of each group of heads": (
        (6, 2 * (2 + 1 + 1) * 4),
        Unfold(-1, (2, 4, 4), Split(-2, (2, 1, 1), MuonDimensionNumbers(-4, (-3, -2, -1)))),
        [(1, 6, 16), (1, 6, 8), (1, 6, 8)],
    ),
    # Of multi-head latent attention: keys without positions and values, from the latent vector.
    "kv_b": (
        (6, 3 * (4 + 2)),
        Unfold(-1, (3, 6), Split(-1, (4, 2), [MuonDimensionNumbers(0, (1, 2)), HEADS])),
        [(1, 6, 12), (3, 6, 2)],
    ),
}


@pytest.mark.parametrize(("shape", "view", "expected"), VIEWS.values(), ids=VIEWS)
def test_a_view_and_its_inverse(shape, view, expected):
    x = jnp.arange(math.prod(shape)).reshape(shape)
    stacks = to_stacks(x, view)
    assert [stack.shape for stack in stacks] == expected
    assert sorted(np.concatenate([s.ravel() for s in stacks])) == [*range(x.size)]
    chex.assert_trees_all_equal(from_stacks(iter(stacks), view, shape), x)
    doubled = from_stacks((2 * stack for stack in stacks), view, shape)
    chex.assert_trees_all_equal(doubled, 2 * x)


def test_matrices_are_those_of_the_unfused_projections():
    q, k, v = (np.random.default_rng(i).standard_normal((6, n)) for i, n in enumerate((8, 4, 4)))
    stacks = to_stacks(jnp.concatenate([q, k, v], 1), Split(1, (8, 4, 4)))
    chex.assert_trees_all_equal(stacks, [jnp.asarray(x)[None] for x in (q, k, v)])
    per_head = to_stacks(jnp.asarray(q), VIEWS["heads"][1])[0]
    chex.assert_trees_all_equal(per_head, jnp.stack([q[:, :4], q[:, 4:]]))


def test_muon_updates_each_part_by_itself_with_its_own_scale():
    rng = np.random.default_rng(0)
    gradient = jnp.asarray(rng.standard_normal((2, 8, 48)), jnp.float32)
    views = Split(-1, (32, 8, 8))
    optimizer = muon(
        1.0, muon_weight_dimension_numbers=views, ns_coeffs=NewtonSchulz(dtype="float32")
    )
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(gradient), gradient)
    for part, scale in [(slice(0, 32), 2.0), (slice(32, 40), 1.0), (slice(40, 48), 1.0)]:
        expected = -scale * newton_schulz(gradient[..., part], dtype="float32")
        chex.assert_trees_all_close(updates[..., part], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (
            Split(1, (8, 9)),
            r"\['w'\] of shape \(6, 16\): Split.*add up to 17: .*add up to 16, the size of axis 1",
        ),
        (Split(1, (-8, 24)), r"Split.*sizes of at least 0 that add up to 16, the size of axis 1"),
        (Split(1, (8, 8), (MATRICES, None)), r"\['w'\].*a view must be .*, got None: AdamW"),
        (
            Unfold(1, (-4, -4), HEADS),
            r"cannot unfold axis 1 of shape \(6, 16\): give it sizes that multiply to 16, of which",
        ),
        (
            Split(1, (8, 8), [MATRICES]),
            r"needs one view for all sizes, or as many views as sizes: got 1 for 2",
        ),
        (
            Unfold(1, (3, 5), HEADS),
            r"cannot unfold axis 1 of shape \(6, 16\): give it sizes that multiply to 16, of which",
        ),
        (
            Unfold(1, (3, -1), HEADS),
            r"cannot unfold axis 1 of shape \(6, 16\): give it sizes that multiply to 16, of which",
        ),
        (
            Unfold(2, (4, 4), HEADS),
            r"axis 2, which is out of range for shape \(6, 16\): .*in \[-2, 2\)",
        ),
        (Split(-3, (4, 4)), r"axis -3, which is out of range for shape \(6, 16\): .*in \[-2, 2\)"),
        (
            MuonDimensionNumbers(0, 2),
            r"\['w'\].*names axis 2, which is out of range for an array of rank 2",
        ),
    ],
)
def test_views_that_do_not_fit_say_so(view, message):
    with pytest.raises(ValueError, match=message):
        parameters_of({"w": view}, {"w": jnp.zeros((6, 16))}, None)
