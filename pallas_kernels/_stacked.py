"""What the kernels have in common with respect to JAX's transformations."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def stacked(kernel: Callable[..., jax.Array], implementation: str) -> Callable[..., jax.Array]:
    """Gives a kernel over stacks `(batch, m, n)` its rules for `vmap` and for derivatives.

    Under `vmap` the stacks become longer, in the same launch. A derivative raises
    NotImplementedError.
    """

    @jax.custom_batching.custom_vmap
    def call(*operands):
        return kernel(*operands)

    @call.def_vmap
    def _(axis_size, in_batched, *operands):
        def merge(operand, batched):
            if not batched:
                operand = jnp.broadcast_to(operand, (axis_size, *operand.shape))
            return operand.reshape(-1, *operand.shape[2:])

        out = call(*jax.tree.map(merge, operands, tuple(in_batched)))
        return out.reshape(axis_size, -1, *out.shape[1:]), True

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
