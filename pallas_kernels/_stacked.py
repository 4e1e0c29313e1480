"""What the kernels have in common: they run on stacks, also under `vmap`, without derivatives."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp


def call_on_stacks(
    kernel: Callable[..., tuple[jax.Array, ...]], implementation: str, *operands: Any
) -> tuple[jax.Array, ...]:
    """Returns the results of `kernel(*operands)`, with the batch shape of the first operand.

    The kernel gets all arrays with one batch axis, of length 1 where a matrix serves for all. Under
    `vmap` the stacks become longer, in the same launch.

    Args:
        kernel: computes stacks.
        implementation: its name, for the error.
        operands: arrays, or trees of arrays. The first array has shape `(..., m, n)`. The others
            start with its batch shape, or with as many ones.

    Raises:
        NotImplementedError: when differentiated.
    """
    batch = jax.tree.leaves(operands)[0].shape[:-2]
    stacks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), operands)
    call = undifferentiable(_with_longer_stacks(kernel), implementation)
    results = call(*stacks)
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


def undifferentiable(
    function: Callable[..., tuple[jax.Array, ...]], implementation: str
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the function of an implementation, which raises an error when differentiated."""

    @jax.custom_jvp
    def call(*operands: Any) -> tuple[jax.Array, ...]:
        return function(*operands)

    @call.defjvp
    def _(primals: Any, tangents: Any) -> NoReturn:
        raise NotImplementedError(
            f"implementation={implementation!r} has no derivative: pass implementation='xla' to"
            " differentiate"
        )

    return call


def _with_longer_stacks(
    kernel: Callable[..., tuple[jax.Array, ...]],
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel, which under `vmap` computes longer stacks."""

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> tuple[jax.Array, ...]:
        return kernel(*operands)

    @call.def_vmap
    def _(
        axis_size: int, in_batched: Sequence[Any], *operands: Any
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        first, is_batched = (jax.tree.leaves(tree)[0] for tree in (operands, in_batched))
        stack = first.shape[int(is_batched)]

        def merge(operand: jax.Array, batched: bool) -> jax.Array:
            operand = operand if batched else operand[None]
            operand = jnp.broadcast_to(operand, (axis_size, stack, *operand.shape[2:]))
            return operand.reshape(-1, *operand.shape[2:])

        results = call(*jax.tree.map(merge, operands, tuple(in_batched)))
        split = tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results)
        return split, (True,) * len(split)

    return call
