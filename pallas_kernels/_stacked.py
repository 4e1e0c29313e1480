"""What the kernels have in common: they run on stacks, under `vmap` too, without derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def call_on_stacks(
    kernel: Callable[..., tuple[jax.Array, ...]],
    implementation: str,
    a_matrix: jax.Array,
    *operands: Any,
) -> tuple[jax.Array, ...]:
    """Returns the results of `kernel(a, *operands)`, with the batch shape of `a_matrix`.

    The kernel gets all arrays of the operands, which are trees of such, with one batch axis. Under
    `vmap` the stacks become longer, in the same launch.

    Raises:
        NotImplementedError: when differentiated.
    """
    batch = a_matrix.shape[:-2]
    stacks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), (a_matrix, *operands))
    results = _with_rules(kernel, implementation)(*stacks)
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in results)


def padded(x: jax.Array) -> jax.Array:
    """Adds rows and columns of zeros to `(..., m, n)`, up to multiples of 64."""
    rows, cols = ((0, -size % 64) for size in x.shape[-2:])
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [rows, cols])


def stack_coefficients(coefficients: tuple[jax.Array, ...], batch: tuple[int, ...]) -> jax.Array:
    """Returns scalars, or arrays of the batch's shape, as one of shape `(*batch, number)`."""
    return jnp.stack(
        [jnp.broadcast_to(x, batch).astype(jnp.float32) for x in coefficients], axis=-1
    )


def _with_rules(kernel, implementation):
    """The kernel with rules for `vmap` and for derivatives."""

    @jax.custom_batching.custom_vmap
    def call(*operands):
        return kernel(*operands)

    @call.def_vmap
    def _(axis_size, in_batched, *operands):
        def merge(operand, batched):
            if not batched:
                operand = jnp.broadcast_to(operand, (axis_size, *operand.shape))
            return operand.reshape(-1, *operand.shape[2:])

        results = call(*jax.tree.map(merge, operands, tuple(in_batched)))
        split = tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results)
        return split, (True,) * len(split)

    @jax.custom_jvp
    def undifferentiable(*operands):
        return call(*operands)

    @undifferentiable.defjvp
    def _(primals, tangents):
        raise NotImplementedError(
            f"implementation={implementation!r} has no derivative: pass implementation='xla' to"
            " differentiate"
        )

    return undifferentiable
