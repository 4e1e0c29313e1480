"""What the kernels have in common: they run on stacks, under `vmap` too, without derivatives."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def call_on_stacks(
    kernel: Callable[..., tuple[jax.Array, ...]],
    implementation: str,
    a_matrix: jax.Array,
    b_matrix: jax.Array | None,
    c_matrices: tuple[jax.Array, ...],
    coefficients: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Returns the results of `kernel(a, b, cs, coefficients)` in the batch shape of `a_matrix`.

    The kernel gets one batch axis, and float32 coefficients of shape `(batch, len(coefficients))`.
    Under `vmap` the stacks become longer, in the same launch.

    Raises:
        NotImplementedError: when differentiated.
    """
    *batch, m, n = a_matrix.shape
    stacked = jnp.stack(
        [jnp.broadcast_to(x, batch).astype(jnp.float32) for x in coefficients], axis=-1
    )
    results = _with_rules(kernel, implementation)(
        a_matrix.reshape(-1, m, n),
        None if b_matrix is None else b_matrix.reshape(-1, m, n),
        tuple(c.reshape(-1, m, m) for c in c_matrices),
        stacked.reshape(-1, len(coefficients)),
    )
    return tuple(x.reshape(*batch, m, m) for x in results)


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
