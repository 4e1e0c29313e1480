"""Matrices that stay sharded: wide ones, and fewer than the devices that share them.

With one owner each, most devices would wait while a few multiply. In the gram form little of the
work is on whole matrices. With the columns of X sharded over the devices, X = (X₁ X₂ …),

    G = XXᵀ = Σᵢ XᵢXᵢᵀ  ->  Q, the steps on G  ->  QX = (QX₁ QX₂ …).

The devices exchange G, summed, and Q: once, and again for each restart of the gram form or further
step of a composed schedule. Where rows are sharded as well, or instead, one all-to-all turns that
into a finer sharding of the columns, and one at the end takes it back. The order of rows and
columns does not matter: G and Q follow the order of the rows, whatever it is.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._distributed.cost import Collective, MeshAxes, names_of
from muon_jax._distributed.plan import Chunk, Leaf, Part
from muon_jax._distributed.units import take_units
from muon_jax._iteration.form import Form
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._iteration.normalization import gram_gain, largest_entries
from muon_jax._iteration.operand import WholeMatrices, scale_down, split, transposed
from muon_jax._matrices.views import MatrixAxes, MuonDimensionNumbers, matrix_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedMatrices(WholeMatrices):
    """Matrices of which each of several devices has some columns.

    | matrices                                  | who iterates on the Gram matrix              |
    | ----------------------------------------- | -------------------------------------------- |
    | one                                       | all devices, alike                           |
    | several, at most as many as devices       | of each its team of neighbours, alike        |

    There are as few teams as matrices, or the next number that divides the devices. Each device
    sums a part of the rows of its team's Gram matrix, and the team gathers the parts. Sums are in
    float32. In 16 bits they are over pieces with what the rounding of the pieces left. The order of
    a sum is the network's.

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
        """Returns `WholeMatrices.gram` of the team's matrix alone; symmetric in any case."""
        del symmetrize_output
        is_half = jnp.finfo(x.dtype).bits == 16
        parts = super().gram(x, alpha, residual=is_half, symmetrize_output=False)
        total = sum(part.astype(jnp.promote_types(x.dtype, jnp.float32)) for part in parts)
        if self.count == 1:
            total = jax.lax.psum(total, self.axes)
        else:
            m = x.shape[-2]
            total = jnp.pad(total, [(0, self._teams - self.count), (0, 0), (0, 0)])
            rows = jax.lax.psum_scatter(self._cut(total), self.axes, tiled=True)
            if self._teams < self.owners:
                teams = np.arange(self.owners).reshape(self._teams, -1).tolist()
                rows = jax.lax.all_gather(rows, self.axes, axis_index_groups=teams, tiled=True)
            total = rows.reshape(1, -1, m)[:, :m]
        # The two halves were summed in different orders. The lower half counts.
        total = jnp.tril(total) + jnp.tril(total, -1).mT.conj()
        rounded = total.astype(x.dtype)
        if not residual:
            return (rounded,)
        rounded = jax.lax.optimization_barrier(rounded)  # XLA would subtract the unrounded total
        return rounded, (total - rounded).astype(x.dtype)

    def apply(self, q: jax.Array, x: jax.Array, *, last: bool) -> jax.Array:
        """Returns `WholeMatrices.apply` of all matrices, for the Q of the team's matrix."""
        return super().apply(self.spread(q), x, last=last)

    def spread(self, q: jax.Array) -> jax.Array:
        """Returns the Q of all matrices, from their teams."""
        if self.count == 1:
            return q
        _, m, columns = q.shape
        rows = self._cut(q)
        member = jax.lax.axis_index(self.axes) % len(rows)
        own = jax.lax.dynamic_slice_in_dim(rows, member, 1)
        gathered = jax.lax.all_gather(own, self.axes, tiled=True)
        return gathered.reshape(self._teams, -1, columns)[: self.count, :m]

    def own(self, values: jax.Array) -> jax.Array:
        """Returns the value for the team's matrix, of values for all matrices; 0 without one."""
        padded = jnp.pad(values, (0, self._teams - self.count))
        team = jax.lax.axis_index(self.axes) * self._teams // self.owners
        return jax.lax.dynamic_slice_in_dim(padded, team, 1)

    @property
    def _teams(self) -> int:
        return count_of_teams(self.count, self.owners)

    def _cut(self, x: jax.Array) -> jax.Array:
        """The rows of matrices `(matrix, m, n)` in parts `(part, rows, n)`, one for each member."""
        members = self.owners // self._teams
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % members), (0, 0)])
        return x.reshape(len(x) * members, -1, x.shape[2])


def count_of_teams(count: int, owners: int) -> int:
    """Returns the least number of equal teams of `owners` devices, one for each of the matrices."""
    return next(teams for teams in range(count, owners + 1) if owners % teams == 0)


def estimate(chunk: Chunk) -> tuple[float, list[Collective]]:
    """Returns the µs of products where the matrices stay sharded, and the collectives.

    - Each device makes the products with X on n/owners columns, and the products on XXᵀ for one
      matrix.
    - A single Gram matrix is summed for all devices.
    - Several Gram matrices are summed for their teams, a part for each device. A team gathers its
      parts, and all devices gather the Q of all teams.
    """
    axes, owners, count = chunk.axes, chunk.owners, chunk.count
    form, (m, n) = sharded_form_of(chunk.leaf), chunk.leaf.kept_shape
    with_x = form.products._replace(squares=0, mixed=0)
    others = form.products._replace(grams=0, applications=0)
    cut, itemsize = -(-n // owners), form.dtype.itemsize
    total, q = m * m * max(itemsize, 4), m * m * itemsize
    sums = [Collective(2 * total, axes, shares=True)]
    if count > 1:
        teams = count_of_teams(count, owners)
        summed, gathered = (Collective(teams * size, axes, shares=True) for size in (total, q))
        in_team = Collective(total, _neighbors(axes, owners // teams), shares=True)
        sums = [summed, in_team, gathered] if teams < owners else [summed, gathered]
    mesh = dict(axes)
    moves = [
        Collective((stop - start) * m * cut * itemsize, tuple((k, mesh[k]) for k in short))
        for leaf, start, stop in chunk.parts
        if (short := _short_axes(leaf))
    ]
    largest_entries = Collective(0.0, axes, shares=True)
    compute = with_x.microseconds((count, m, cut)) + others.microseconds((1, m, m))
    return compute, [largest_entries, *form.products.grams * sums, *moves, *moves]


def _neighbors(axes: MeshAxes, count: int) -> MeshAxes:
    """The axes, with how many of `count` neighbors in the order of the mesh are along each."""
    found: list[tuple[str, int]] = []
    for name, size in reversed(axes):
        along = min(size, count)
        count = -(-count // along)
        found.append((name, along))
    return tuple(reversed(found))


def run_kept_sharded(
    chunk: Chunk, shards: Mapping[int, jax.Array], iterations: Sequence[NewtonSchulz]
) -> Iterator[tuple[Part, jax.Array]]:
    """Yields the pieces of the polar factors for each part: `(unit, rows, columns)`."""
    leaf, form = chunk.leaf, sharded_form_of(chunk.leaf)
    stacks = take_units(chunk.parts, shards, sides_of)
    _, m, n = leaf.matrices[0]
    operand = ShardedMatrices(
        implementation=form.chosen((m, n)),
        axes=names_of(chunk.axes),
        owners=chunk.owners,
        count=chunk.count,
    )
    largest = jax.lax.pmax(largest_entries(stacks), operand.axes)
    scaled, scale = scale_down(stacks, largest, n, form.dtype, operand)
    x = jnp.concatenate([*map(_with_whole_rows, scaled, chunk.leaves)])
    x = iterations[leaf.iteration].iterate(x, form, operand.own(scale), gram_gain(n), operand)
    for own, part, given in zip(split(x, stacks), chunk.parts, stacks, strict=True):
        yield part, _with_rows_of(own, part[0], given)


def _with_whole_rows(x: jax.Array, leaf: Leaf) -> jax.Array:
    """The pieces `(unit, m, columns)` of matrices, from pieces that any axes shard."""
    x = transposed(x) if leaf.is_transposed else x
    names = _short_axes(leaf)
    if not names:
        return x
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[-1] % jax.lax.axis_size(names))])
    return jax.lax.all_to_all(x, names, 2, 1, tiled=True)


def _with_rows_of(x: jax.Array, leaf: Leaf, given: jax.Array) -> jax.Array:
    """The inverse of `_with_whole_rows`, in the shape of `given`."""
    names = _short_axes(leaf)
    x = jax.lax.all_to_all(x, names, 1, 2, tiled=True) if names else x
    return (x.mT if leaf.is_transposed else x)[:, : given.shape[1], : given.shape[2]]


def _short_axes(leaf: Leaf) -> tuple[str, ...]:
    """The mesh axes that shard the m rows of sharded matrices."""
    axes = sides_of(leaf)
    short = axes.output if leaf.is_transposed else axes.reduction
    return sum((leaf.axes[i] for i in short), ())


def sides_of(leaf: Leaf) -> MatrixAxes:
    """Returns the axes of matrices that can stay sharded."""
    assert isinstance(leaf.view, MuonDimensionNumbers)
    return matrix_axes(len(leaf.shape), leaf.view)


def sharded_form_of(leaf: Leaf) -> Form:
    """Returns the form of matrices that can stay sharded."""
    assert isinstance(leaf.sharded_form, Form)
    return leaf.sharded_form
