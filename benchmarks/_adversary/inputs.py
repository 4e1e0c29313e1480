"""Structured matrices, whose Gram matrices have few different entries, and how to vary them."""

from typing import NamedTuple

import numpy as np

NOISES = (0.0, 1e-3, 1e-2)
_SHORTEST, _LONGEST = 1e-4, 1.3


class Genome(NamedTuple):
    """The matrix diag(rows)·signs·diag(columns), and noise.

    Attributes:
        signs: -1, 0 and 1, shape `(m, m)`, int8.
        rows: a length for each row, few of them different; shape `(m,)`.
        columns: likewise for the columns.
        noise: the RMS of Gaussian noise, over that of the matrix without it.
    """

    signs: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    noise: float = 0.0

    def matrix(self, gaussian: np.ndarray) -> np.ndarray:
        """Returns the matrix in float32, with the noise of this Gaussian matrix."""
        x = self.rows[:, None] * self.signs * self.columns
        return (x + self.noise * np.sqrt(np.mean(x**2)) * gaussian).astype(np.float32)


# ------------------------------------------------------------------------------------ known inputs


def hadamard(m: int) -> np.ndarray:
    """Returns Sylvester's Hadamard matrix, or the first m rows and columns of a larger one."""
    i = np.arange(m)
    return (1 - 2 * (np.bitwise_count(i[:, None] & i) & 1)).astype(np.int8)


def half(m: int, length: float, first: float) -> Genome:
    """Returns columns of a Hadamard matrix: half of them, of one length, and a short first one.

    A bent function says which half. It is as far from each sum of bits as a function can be.

    Args:
        m: the size.
        length: of the columns.
        first: the length of the first column, over that of the others.
    """
    i, k = np.arange(m), (m.bit_length() - 1) // 2
    columns = length * (np.bitwise_count((i >> k) & (i & (2**k - 1))) & 1).astype(float)
    columns[0] = length * first
    return Genome(hadamard(m), np.ones(m), columns)


def four_levels() -> Genome:
    """Returns the 16×16 matrix on which "polar_express_nvidia" was infinite in bfloat16."""
    a, b, c, d = 0.153948799, 5.11875951e-05, 0.0366050005, 0.000300892192
    columns = np.array([0, a, a, a, 0, a, b, 0, c, d, a, d, b, 0, d, a])
    return Genome(hadamard(16), np.ones(16), columns)


def two_row_lengths() -> Genome:
    """Returns the 8×8 matrix of rank 4 on which "balanced" reached 8.8 in bfloat16."""
    positive = ["-+++", "--++", "+---", "-+++", "--++", "+---", "----", "++--"]
    signs = np.array([[1 if sign == "+" else -1 for sign in row] for row in positive], np.int8)
    rows = np.ones(8)
    rows[[1, 2, 3, 6]] = 0.0832132834
    columns = np.array([9.8628062e-04, 1.0047698, 6.1561566e-02, 7.6981783e-03])
    return Genome(np.pad(signs, ((0, 0), (0, 4))), rows, np.pad(columns, (0, 4)))


# c and t of `half` on which composed schedules exceeded 1.5 before their fits had a worst case:
# "fast", "balanced" and "accurate" in float16 at m = 64, and two more at m = 1024.
HALVES = ((1.297, 0.05), (1.297, 0.0169), (1.242, 0.0718), (1.297, 0.0346), (1.242, 0.5725))


def known_inputs(m: int) -> list[Genome]:
    """Returns the inputs that are known, at size m: tiled with signs, and with zeros around."""
    genomes = [half(m, length, first) for length, first in HALVES]
    for genome in (four_levels(), two_row_lengths()):
        size = len(genome.rows)
        if m % size == 0:
            tiles = m // size
            genomes.append(
                Genome(
                    np.kron(hadamard(tiles), genome.signs),
                    np.tile(genome.rows, tiles),
                    np.tile(genome.columns, tiles),
                )
            )
        if m > size:
            zeros = (0, m - size)
            genomes.append(
                Genome(
                    np.pad(genome.signs, zeros),
                    np.pad(genome.rows, zeros),
                    np.pad(genome.columns, zeros),
                )
            )
    return genomes


# ------------------------------------------------------------------------------------- random ones


def random_genome(m: int, rng: np.random.Generator) -> Genome:
    """Returns a genome of few lengths: signs of a Hadamard matrix in any order, or random ones."""
    kind = rng.integers(4)
    if kind == 0:
        genome = half(m, *rng.uniform((1, 0), (_LONGEST, 1)))
        return genome._replace(columns=genome.columns + (genome.columns == 0) * _length(rng, 0.7))
    signs = rng.choice(np.array([-1, 1], np.int8), (m, m)) if kind == 1 else hadamard(m)
    if kind == 2:
        signs = signs[:, rng.permutation(m)]
    columns = _lengths(m, int(rng.integers(1, 6)), rng)
    rows = _lengths(m, int(rng.integers(1, 4)), rng) if rng.random() < 0.3 else np.ones(m)
    genome = Genome(signs, rows, columns, rng.choice(NOISES, p=(0.8, 0.1, 0.1)))
    return _with_copied_rows(genome, rng) if rng.random() < 0.3 else genome


def _length(rng: np.random.Generator, zero: float = 0.2) -> float:
    """Log-uniform, and 0 with that probability."""
    exponent = rng.uniform(np.log(_SHORTEST), np.log(_LONGEST))
    return float(np.exp(exponent) * (rng.random() >= zero))


def _lengths(m: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """One of `count` lengths for each of m rows or columns, one of them not zero."""
    levels = np.array([_length(rng, 0.0), *(_length(rng) for _ in range(count - 1))])
    lengths = rng.choice(levels, m, p=rng.dirichlet(np.ones(count)))
    lengths[rng.integers(m)] = levels[0]
    return lengths


# --------------------------------------------------------------------------------------- variation


def crossed(one: Genome, other: Genome, rng: np.random.Generator) -> Genome:
    """Returns a genome with each attribute from one of the two."""
    from_other = [name for name in Genome._fields if rng.random() < 0.5]
    return one._replace(**{name: getattr(other, name) for name in from_other})


def mutated(genome: Genome, rng: np.random.Generator) -> Genome:
    """Returns the genome with one to three changes."""
    for _ in range(rng.integers(1, 4)):
        change = _CHANGES[rng.choice(len(_CHANGES), p=_CHANCES)]
        genome = change(genome, rng)
    return genome


def _with_a_length_perturbed(genome: Genome, rng: np.random.Generator) -> Genome:
    side, lengths = _side(genome, rng, rows=0.2)
    chosen = rng.choice(np.unique(lengths))
    factor = np.exp(rng.choice([0.01, 0.1, 1.0]) * rng.standard_normal())
    return genome._replace(**{side: np.where(lengths == chosen, factor * lengths, lengths)})


def _with_lengths_reassigned(genome: Genome, rng: np.random.Generator) -> Genome:
    side, lengths = _side(genome, rng, rows=0.3)
    chosen = rng.integers(0, len(lengths), rng.integers(1, 2 + len(lengths) // 8))
    new = rng.choice(lengths) if rng.random() < 0.8 else _length(rng)
    lengths = lengths.copy()
    lengths[chosen] = new
    return genome._replace(**{side: lengths})


def _with_copied_rows(genome: Genome, rng: np.random.Generator) -> Genome:
    m = len(genome.rows)
    count = rng.integers(1, 2 + m // 4)
    to, origin = rng.integers(0, m, (2, count))
    signs = genome.signs.copy()
    signs[to] = rng.choice(np.array([-1, 1], np.int8), (count, 1)) * genome.signs[origin]
    return genome._replace(signs=signs)


def _with_signs_flipped(genome: Genome, rng: np.random.Generator) -> Genome:
    signs = genome.signs.copy()
    row, column = rng.integers(0, len(signs), 2)
    signs[row, column : column + rng.integers(1, 3)] *= -1
    return genome._replace(signs=signs)


def _with_other_noise(genome: Genome, rng: np.random.Generator) -> Genome:
    return genome._replace(noise=float(rng.choice(NOISES)))


def _side(genome: Genome, rng: np.random.Generator, rows: float) -> tuple[str, np.ndarray]:
    """The rows with that probability, else the columns."""
    side = "rows" if rng.random() < rows else "columns"
    return side, getattr(genome, side)


_CHANGES = (
    _with_a_length_perturbed,
    _with_lengths_reassigned,
    _with_copied_rows,
    _with_signs_flipped,
    _with_other_noise,
)
_CHANCES = (0.5, 0.25, 0.1, 0.1, 0.05)
