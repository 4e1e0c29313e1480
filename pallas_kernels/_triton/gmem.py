"""Blocks of matrices in global memory, as a program of the Triton kernels reads and writes them."""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

type GmemRef = Any  # a reference to global memory


class GmemBlock(NamedTuple):
    """A block of one matrix of a stack in global memory, which may reach out of bounds.

    A stack of one matrix has that matrix at every index.
    """

    gmem: GmemRef
    batch: jax.Array
    row: jax.Array
    col: jax.Array
    shape: tuple[int, int]

    def load(self) -> jax.Array:
        """Returns the block, with zeros where it is out of bounds."""
        mask = self._mask()
        return plt.load(self._ref(), mask=mask, other=None if mask is None else 0.0)

    def store(self, values: jax.Array) -> None:
        """Writes the part of the block that is within bounds."""
        plt.store(self._ref(), values, mask=self._mask())

    def _ref(self) -> GmemRef:
        batch = self.batch if self.gmem.shape[0] > 1 else jnp.int32(0)
        rows, cols = map(pl.ds, (self.row, self.col), self.shape)
        return self.gmem.at[batch, rows, cols]

    def _mask(self) -> jax.Array | None:
        """Returns where the block is within bounds, or None where every block is."""
        _, m, n = self.gmem.shape
        if m % self.shape[0] == 0 and n % self.shape[1] == 0:
            return None
        row_ids, col_ids = map(operator.add, (self.row, self.col), map(jnp.arange, self.shape))
        return (row_ids < m)[:, None] & (col_ids < n)[None, :]
