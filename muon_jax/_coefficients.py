"""Coefficients by path: which iteration the matrices of each parameter have."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._iteration.schedules import NSCoeffs, canonicalize
from muon_jax._trees import check_each_decides, errors_naming, first_match, has_masked, path_name

# Coefficients for each regular expression of paths, or a function of a path and a shape.
type _OfOnePath = NSCoeffs | NewtonSchulz
type CoeffsByPath = Mapping[str, _OfOnePath] | Callable[[str, tuple[int, ...]], _OfOnePath]


@dataclasses.dataclass(frozen=True)
class Iterations:
    """The iterations of a tree's matrices.

    Attributes:
        distinct: one for each set of coefficients.
        names: what reports call each set.
        of_leaves: for each leaf of the tree, the index of its iteration.
    """

    distinct: tuple[NewtonSchulz, ...]
    names: tuple[str, ...]
    of_leaves: tuple[int, ...]

    def of_some(self, leaves: Sequence[int]) -> "Iterations":
        """Returns the iterations of a tree that has these leaves alone."""
        return dataclasses.replace(self, of_leaves=tuple(self.of_leaves[i] for i in leaves))


def iterations_by_path(
    ns_coeffs: NSCoeffs | NewtonSchulz | CoeffsByPath, **arguments: Any
) -> Callable[[Any], Iterations]:
    """Returns a function from a tree of whole arrays, or shapes of them, to its iterations.

    Args:
        ns_coeffs: as for `scale_by_muon`.
        **arguments: `steps`, `eps` and others that stand for attributes that are None.

    Raises:
        TypeError: coefficients are themselves a dict or a callable.
        ValueError: coefficients are wrong, or beside the other arguments. The function also raises
            where a dict has no pattern for a leaf, and as `check_patterns`.
    """

    def iteration_of(coeffs: Any) -> NewtonSchulz:
        if not isinstance(coeffs, NewtonSchulz):
            coeffs = NewtonSchulz(canonicalize("ns_coeffs", coeffs))
        return coeffs.filled(**arguments)

    patterns: dict[str, NewtonSchulz] = {}
    if not callable(ns_coeffs):
        given = ns_coeffs if isinstance(ns_coeffs, Mapping) else {"": ns_coeffs}
        patterns = {pattern: iteration_of(coeffs) for pattern, coeffs in given.items()}

    def of_leaf(name: str, shape: tuple[int, ...]) -> NewtonSchulz:
        if callable(ns_coeffs):
            return iteration_of(ns_coeffs(name, shape))
        pattern = first_match(patterns, name)
        if pattern is None:
            raise ValueError(
                "no pattern of ns_coeffs matches its path: add '.*': 'standard' as the last entry,"
                " for all paths that no other pattern matches"
            )
        return patterns[pattern]

    def of_tree(tree: Any) -> Iterations:
        check_patterns(ns_coeffs, jax.tree.map(lambda _: "muon", tree))
        found: dict[Any, NewtonSchulz] = {}
        keys = []
        for path, x in jax.tree.leaves_with_path(tree):
            name, shape = path_name(path), np.shape(x)
            with errors_naming(name, shape):
                iteration = of_leaf(name, shape)
            keys.append(iteration.key)
            found.setdefault(keys[-1], iteration)
        order = {key: i for i, key in enumerate(found)}
        shown = tuple(_named(iteration.coeffs) for iteration in found.values())
        return Iterations((*found.values(),), shown, tuple(order[key] for key in keys))

    return of_tree


def check_patterns(ns_coeffs: NSCoeffs | NewtonSchulz | CoeffsByPath, labels: Any) -> None:
    """Raises ValueError where a pattern decides no path of Muon's, although no leaf is masked.

    Args:
        ns_coeffs: as for `scale_by_muon`.
        labels: for each parameter the name of its optimizer.
    """
    named = jax.tree.leaves_with_path(labels)
    names = [path_name(path) for path, label in named if label == "muon"]
    if isinstance(ns_coeffs, Mapping) and names and not has_masked(labels):
        check_each_decides("ns_coeffs", ns_coeffs, names, "parameters that Muon has")


def map_by_iteration(
    iterations: Sequence[NewtonSchulz],
    numbers: Sequence[int],
    stacks: Sequence[Sequence[jax.Array]],
) -> list[jax.Array]:
    """Returns the polar factors of all stacks, one after the other.

    Args:
        iterations: the iterations.
        numbers: for each sequence of stacks, the index of its iteration.
        stacks: as for `NewtonSchulz.map`.
    """
    flat = [(n, x) for n, each in zip(numbers, stacks, strict=True) for x in each]
    results: dict[int, jax.Array] = {}
    for number, iteration in enumerate(iterations):
        own = [i for i, (of_stack, _) in enumerate(flat) if of_stack == number]
        results |= zip(own, iteration.map([flat[i][1] for i in own]), strict=True)
    return [results[i] for i in range(len(flat))]


def _named(coeffs: Any) -> str:
    """What reports call canonical coefficients."""
    if isinstance(coeffs, str):
        return coeffs
    if isinstance(coeffs, jax.Array):
        return "traced"
    if isinstance(coeffs[0], tuple):
        return f"{len(coeffs)} triples"
    return "({:g}, {:g}, {:g})".format(*coeffs)
