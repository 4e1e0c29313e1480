"""What the kernels have in common: they run on stacks, under `vmap` too, without derivatives."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def call_on_stacks(
    kernel: Callable[..., jax.Array],
    implementation: str,
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrix: jax.Array | None,
    alpha: jax.Array,
    beta: jax.Array,
    diagonal: jax.Array,
) -> jax.Array:
    """Returns `kernel(a, b, c, coefficients)` in the batch shape of `a_matrix`.

    The kernel gets one batch axis, and float32 coefficients (alpha, beta, diagonal) of shape
    `(batch, 3)`. Under `vmap` the stacks become longer, in the same launch.

    Raises:
        NotImplementedError: when differentiated.
    """
    *batch, m, n = a_matrix.shape
    coefficients = jnp.stack(
        [jnp.broadcast_to(x, batch).astype(jnp.float32) for x in (alpha, beta, diagonal)], axis=-1
    )
    out = _with_rules(kernel, implementation)(
        a_matrix.reshape(-1, m, n),
        None if b_matrix is None else b_matrix.reshape(-1, m, n),
        None if c_matrix is None else c_matrix.reshape(-1, m, m),
        coefficients.reshape(-1, 3),
    )
    return out.reshape(*batch, m, m)


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
