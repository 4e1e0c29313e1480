"""Shardings that nobody knows: stacks of parameters, which XLA spreads over all devices.

A whole stack is sharded as its parameters are, whatever that is. Then its first axis takes one mesh
axis after the other, the last one first, and gives them back in the other order:

    (stack, rows, cols)  sharded as  (-, x, y)  ->  (y, x, -)  ->  (yx, -, -), of whole parameters.

Each arrow is one all-to-all for each stack, along one mesh axis, which XLA finds by itself. At once
it would gather everything.

-   Parameters of one stack should be sharded alike. Those are stacked whose paths differ in numbers
    alone, such as those of layers.
-   The work on replicated parameters is spread, too. Their updates are gathered.
-   Parameters with batch axes are their own stack. XLA moves mesh axes that shard a batch.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from muon_jax._distributed.plan import Leaf
from muon_jax._distributed.planning import max_bucket_bytes
from muon_jax._distributed.sharding import Mesh
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._iteration.operand import bounded
from muon_jax._matrices.views import from_stacks, to_stacks


def run_stacked(
    iterations: Sequence[NewtonSchulz],
    units: Sequence[Leaf],
    arrays: Sequence[jax.Array],
    mesh: Mesh,
) -> list[jax.Array]:
    """Returns the results for parameters that are sharded over automatic axes, nobody knows how."""
    results = {}
    for group in _alike_and_small(iterations, units, mesh):
        own = [arrays[leaf.index] for leaf in group]
        done = _run_group(iterations[group[0].iteration], group, own, mesh)
        results |= zip((leaf.index for leaf in group), done, strict=True)
    # XLA shards the operands of a choice alike, so results like parameters. It cannot know which
    # operand is chosen.
    is_done = jax.lax.optimization_barrier(jnp.array(True))
    return [jnp.where(is_done, results[i], x) for i, x in enumerate(arrays)]


def _alike_and_small(
    iterations: Sequence[NewtonSchulz], units: Sequence[Leaf], mesh: Mesh
) -> Iterator[tuple[Leaf, ...]]:
    """Yields the parameters of each stack, of which no device gets more bytes than is allowed."""

    def alike(leaf: Leaf) -> tuple[str, ...]:
        own = str(leaf.index) if leaf.batch else ""
        name = re.sub(r"\d+", "", leaf.name)
        return name, leaf.layout, leaf.dtype.name, str(leaf.iteration), own

    for _, group in itertools.groupby(sorted(units, key=alike), key=alike):
        leaves = [*group]
        size = math.prod(leaves[0].shape) * _wire(leaves[0]).itemsize
        slots = max(1, max_bucket_bytes(iterations) // max(1, size))
        yield from itertools.batched(leaves, slots * mesh.size)


def _wire(leaf: Leaf) -> jnp.dtype:
    """The dtype in which a parameter is exchanged. Float16 would need a scale of its own."""
    return leaf.dtype if leaf.wire == jnp.float16 else leaf.wire


def _run_group(
    iteration: NewtonSchulz,
    leaves: Sequence[Leaf],
    arrays: Sequence[jax.Array],
    mesh: Mesh,
) -> list[jax.Array]:
    """Returns the results for parameters of one layout, as one stack of their units."""
    leaf, wire = leaves[0], _wire(leaves[0])
    others = tuple(i for i in range(len(leaf.shape)) if i not in leaf.batch)
    order = (*leaf.batch, *others)
    whole = [arrays[0].shape[i] for i in order]
    shape = [leaf.shape[i] for i in others]
    stack = jnp.concatenate(
        [bounded(x, wire).astype(wire).transpose(order).reshape(-1, *shape) for x in arrays]
    )
    count = len(stack)
    stack = jnp.pad(stack, [(0, -count % mesh.size)] + [(0, 0)] * len(shape))
    # XLA shards what a constraint is of as the constraint says. That must not be the parameters.
    stack = jax.lax.optimization_barrier(stack)
    *steps, last = _steps(mesh, bool(leaf.batch))
    for names in steps:
        stack = _constrained(stack, names, mesh, PartitionSpec.UNCONSTRAINED)
    stack = _constrained(stack, last, mesh, None)

    stacks = jax.vmap(lambda x: to_stacks(x.reshape(leaf.shape), leaf.view))(stack)
    flat = [jax.lax.collapse(x, 0, 2) for x in stacks]
    done = iteration.map(flat)
    done = [x.reshape(given.shape) for x, given in zip(done, stacks, strict=True)]
    stack = jax.vmap(lambda x: from_stacks(iter(x), leaf.view, leaf.shape).reshape(shape))(done)

    stack = _constrained(stack, last, mesh, None)
    for names in reversed(steps):
        stack = _constrained(stack, names, mesh, PartitionSpec.UNCONSTRAINED)
    stack = jax.lax.optimization_barrier(stack)
    units = jnp.split(stack[:count], len(arrays))
    return [
        x.reshape(whole).transpose([order.index(i) for i in range(len(order))]).astype(leaf.dtype)
        for x in units
    ]


def _steps(mesh: Mesh, is_batch: bool) -> list[tuple[str, ...]]:
    """The mesh axes that shard the first axis of a stack, step by step.

    -   A stack of parameters is whole at first. The last mesh axis comes first, for that is the one
        that XLA can take from an axis of a parameter with two mesh axes.
    -   A stack that is the batch of one parameter may be sharded already, as experts are, and by
        the first mesh axes rather than by the last.
    """
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    if not is_batch:
        names.reverse()
    return [tuple(names[:count]) for count in range(is_batch, len(names) + 1)]


def _constrained(x: jax.Array, names: tuple[str, ...], mesh: Mesh, others: Any) -> jax.Array:
    """`x`, whose first axis these mesh axes shard, and whose other axes have the entry `others`."""
    spec = PartitionSpec(names or None, *[others] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
