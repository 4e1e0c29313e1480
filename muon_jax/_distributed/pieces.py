"""Matrices in pieces: each of several devices has some columns."""

import dataclasses

import jax
import jax.numpy as jnp

from muon_jax._iteration.operand import Whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces(Whole):
    """Matrices of which each of several devices has some columns.

    A single one all devices iterate on alike. Of several, at most as many as there are devices,
    each has an owner, which iterates on it alone: a part of the rows of all Gram matrices is summed
    on each device, and sent to the owners. Sums are in float32, over pieces in 16 bits with what
    their rounding left. Their order is the network's.

    Attributes:
        axes: the mesh axes that the devices are along.
        owners: how many devices.
        count: how many matrices.
    """

    axes: tuple[str, ...]
    owners: int
    count: int

    def gram(
        self,
        x: jax.Array,
        alpha: float | jax.Array = 1.0,
        *,
        residual: bool = False,
        symmetrize_output: bool = True,
    ) -> tuple[jax.Array, ...]:
        """Returns what `Whole.gram` does, of the owned matrix alone; symmetric in any case."""
        del symmetrize_output
        is_half = jnp.finfo(x.dtype).bits == 16
        parts = super().gram(x, alpha, residual=is_half, symmetrize_output=False)
        total = sum(part.astype(jnp.promote_types(x.dtype, jnp.float32)) for part in parts)
        if self.count == 1:
            total = jax.lax.psum(total, self.axes)
        else:
            m = x.shape[-2]
            total = jnp.pad(total, [(0, 0), (0, -m % self.owners), (0, 0)])
            rows = jax.lax.psum_scatter(total, self.axes, scatter_dimension=1, tiled=True)
            rows = jnp.pad(rows, [(0, self.owners - self.count), (0, 0), (0, 0)])
            total = jax.lax.all_to_all(rows, self.axes, 0, 1, tiled=True)[:, :m]
        # Of the two halves, summed in different orders, the lower.
        total = jnp.tril(total) + jnp.tril(total, -1).mT.conj()
        rounded = total.astype(x.dtype)
        if not residual:
            return (rounded,)
        rounded = jax.lax.optimization_barrier(rounded)  # or XLA subtracts what it was before
        return rounded, (total - rounded).astype(x.dtype)

    def spread(self, q: jax.Array) -> jax.Array:
        """Returns the Q of all matrices, from their owners."""
        if self.count == 1:
            return q
        m = q.shape[-2]
        q = jnp.pad(q, [(0, 0), (0, -m % self.owners), (0, 0)])
        rows = jax.lax.all_to_all(q, self.axes, 1, 0, tiled=True)[: self.count]
        return jax.lax.all_gather(rows, self.axes, axis=1, tiled=True)[:, :m]

    def own(self, values: jax.Array) -> jax.Array:
        """Returns that of the values for all matrices which is for the owned one, else 0."""
        if self.count == 1:
            return values
        padded = jnp.pad(values, (0, self.owners - self.count))
        return jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(self.axes), 1)
