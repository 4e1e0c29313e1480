"""What the kernels have in common: they run on stacks, also under `vmap`, without derivatives."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp


def call_on_stacks(
    kernel: Callable[..., tuple[jax.Array, ...]],
    implementation: str,
    a_matrix: jax.Array,
    *operands: Any,
) -> tuple[jax.Array, ...]:
    """Returns the results of `kernel(a, *operands)`, with the batch shape of `a_matrix`.

    The kernel gets all arrays with one batch axis, of length 1 where a matrix serves for all. Under
    `vmap` the stacks become longer, in the same launch.

    Args:
        kernel: computes stacks.
        implementation: its name, for the error.
        a_matrix: shape `(..., m, n)`.
        operands: arrays, or trees of arrays, that start with the batch shape of `a_matrix`, or with
            as many ones.

    Raises:
        NotImplementedError: when differentiated.
    """
    batch = a_matrix.shape[:-2]
    stacks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), (a_matrix, *operands))
    results = _with_rules(kernel, implementation)(*stacks)
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in results)


def padded(x: jax.Array) -> jax.Array:
    """Returns `(..., m, n)` with rows and columns of zeros added, up to multiples of 64."""
    rows, cols = ((0, -size % 64) for size in x.shape[-2:])
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [rows, cols])


def stack_coefficients(
    coefficients: tuple[float | jax.Array, ...], batch: tuple[int, ...]
) -> jax.Array:
    """Returns scalars and arrays of shape `batch` as one float32 array `(*batch, number)`."""
    return jnp.stack(
        [jnp.broadcast_to(x, batch).astype(jnp.float32) for x in coefficients], axis=-1
    )


def _with_rules(
    kernel: Callable[..., tuple[jax.Array, ...]], implementation: str
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel with rules for `vmap` and for derivatives."""

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> tuple[jax.Array, ...]:
        return kernel(*operands)

    @call.def_vmap
    def _(
        axis_size: int, in_batched: Sequence[Any], *operands: Any
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        stack = operands[0].shape[int(in_batched[0])]

        def merge(operand: jax.Array, batched: bool) -> jax.Array:
            operand = operand if batched else operand[None]
            operand = jnp.broadcast_to(operand, (axis_size, stack, *operand.shape[2:]))
            return operand.reshape(-1, *operand.shape[2:])

        results = call(*jax.tree.map(merge, operands, tuple(in_batched)))
        split = tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results)
        return split, (True,) * len(split)

    @jax.custom_jvp
    def undifferentiable(*operands: Any) -> tuple[jax.Array, ...]:
        return call(*operands)

    @undifferentiable.defjvp
    def _(primals: Any, tangents: Any) -> NoReturn:
        raise NotImplementedError(
            f"implementation={implementation!r} has no derivative: pass implementation='xla' to"
            " differentiate"
        )

    return undifferentiable
