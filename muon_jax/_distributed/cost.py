"""What exchanges between devices cost."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from muon_jax._iteration.cost import Products

# Bytes per µs, and the µs of a launch. Measured on four H200s with NVLink, from the time of one
# update in which each device exchanged 302 MB.
_EXCHANGE_BYTES, _EXCHANGE_LAUNCH = 250e3, 20.0


def exchange_microseconds(num_bytes: float) -> float:
    """Returns a model's time for a collective among H200s of one host.

    Args:
        num_bytes: what each device sends.
    """
    return _EXCHANGE_LAUNCH + num_bytes / _EXCHANGE_BYTES


class Estimate(NamedTuple):
    """What the orthogonalization of sharded matrices costs each device.

    Attributes:
        compute: µs of products.
        sent: the bytes of each collective.
    """

    compute: float
    sent: tuple[float, ...]

    @property
    def microseconds(self) -> float:
        """The time of products and collectives, one after the other."""
        return self.compute + sum(map(exchange_microseconds, self.sent))


def by_owners(products: Products, shape: tuple[int, int], owners: int, itemsize: int) -> Estimate:
    """Returns the cost of at most one (m, n) matrix for each owner, exchanged whole.

    Args:
        products: of the form that the matrices are orthogonalized in.
        shape: `(m, n)`.
        owners: the number of devices.
        itemsize: of the dtype on the wire.
    """
    sent = math.prod(shape) * itemsize * (1 - 1 / owners)
    return Estimate(products.microseconds(shape), (sent, sent))


def count_of_teams(count: int, owners: int) -> int:
    """Returns the least number of equal teams of `owners` devices, one for each of the matrices.

    Args:
        count: of matrices, at most `owners`.
        owners: how many devices.
    """
    return next(teams for teams in range(count, owners + 1) if owners % teams == 0)


def cost_in_pieces(
    products: Products,
    shape: tuple[int, int, int],
    owners: int,
    itemsize: int,
    cuts: Sequence[tuple[int, int]],
) -> Estimate:
    """Returns the cost of the gram form on pieces of matrices, `shape` being (count, m, n).

    - Each device makes the products with X on n/owners columns, and the products on XXᵀ for one
      matrix.
    - A single Gram matrix is summed for all devices.
    - Several Gram matrices are summed for their teams, a part for each device. A team gathers its
      parts, and all devices gather the Q of all teams.

    Args:
        products: of the gram form.
        shape: `(count, m, n)`, count ≤ owners.
        owners: the number of devices.
        itemsize: of the products' dtype.
        cuts: pairs `(k, c)`: k of the matrices are cut in c parts along their short axis.
    """
    count, m, n = shape
    with_x = products._replace(squares=0, mixed=0)
    others = products._replace(grams=0, applications=0)
    cut = -(-n // owners)
    part = 1 - 1 / owners
    total, q = m * m * max(itemsize, 4), m * m * itemsize
    teams = count_of_teams(count, owners)
    in_team = total * (1 - teams / owners)
    several = (teams * total * part, in_team, teams * q * part)
    one_round = (2 * total * part,) if count == 1 else several
    moves = tuple(k * m * cut * itemsize * (1 - 1 / c) for k, c in cuts if c > 1)
    return Estimate(
        with_x.microseconds((count, m, cut)) + others.microseconds((1, m, m)),
        (0.0, *products.grams * one_round, *moves, *moves),  # the first finds the largest entries
    )
