"""Coefficients by path: which iteration the matrices of each parameter have."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from muon_jax._iteration.iteration import Iteration
from muon_jax._iteration.schedules import NSCoeffs, canonicalize
from muon_jax._trees import check_patterns_decide, errors_naming, has_masked, path_name

# Coefficients for each regular expression of paths, or a function of a path and a shape.
type CoeffsByPath = Mapping[str, NSCoeffs] | Callable[[str, tuple[int, ...]], NSCoeffs]


@dataclasses.dataclass(frozen=True)
class Iterations:
    """The iterations of a tree's matrices.

    Attributes:
        distinct: one for each set of coefficients.
        names: what reports call each set.
        of_leaves: for each leaf of the tree, the index of its iteration.
    """

    distinct: tuple[Iteration, ...]
    names: tuple[str, ...]
    of_leaves: tuple[int, ...]

    def of_some(self, leaves: Sequence[int]) -> "Iterations":
        """Returns the iterations of a tree that has these leaves alone."""
        return dataclasses.replace(self, of_leaves=tuple(self.of_leaves[i] for i in leaves))


def iterations_by_path(
    ns_coeffs: NSCoeffs | CoeffsByPath, *steps_and_eps: Any, **attributes: Any
) -> Callable[[Any], Iterations]:
    """Returns a function from a tree of whole arrays, or shapes of them, to its iterations.

    Args:
        ns_coeffs: as for `scale_by_muon`.
        steps_and_eps: of all iterations, as for `Iteration.resolve`.
        attributes: of all iterations, likewise.

    Raises:
        TypeError: coefficients are themselves a dict or a callable.
        ValueError: coefficients are wrong, or beside the other arguments. The function also raises
            where a dict has no pattern for a leaf, and as `check_patterns`.
    """

    def resolve(coeffs: Any) -> Iteration:
        iteration = Iteration.resolve(coeffs, *steps_and_eps, **attributes)
        dtype = attributes["dtype"]
        if iteration.schedule.is_composed and dtype not in ("auto", None):
            iteration.schedule.steps_in(dtype)  # raises where the schedule is unsafe
        return iteration

    patterns: dict[str, Any] = {}
    if not callable(ns_coeffs):
        given = ns_coeffs if isinstance(ns_coeffs, Mapping) else {"": ns_coeffs}
        patterns = {pattern: canonicalize(coeffs) for pattern, coeffs in given.items()}
        for coeffs in patterns.values():
            resolve(coeffs)

    def of_leaf(name: str, shape: tuple[int, ...]) -> Any:
        if callable(ns_coeffs):
            return canonicalize(ns_coeffs(name, shape))
        for pattern, coeffs in patterns.items():
            if re.search(pattern, name):
                return coeffs
        raise ValueError(
            "no pattern of ns_coeffs matches its path: add '.*': 'standard' as the last entry, for"
            " all paths that no other pattern matches"
        )

    def of_tree(tree: Any) -> Iterations:
        leaves = [(path_name(path), np.shape(x)) for path, x in jax.tree.leaves_with_path(tree)]
        check_patterns(ns_coeffs, jax.tree.map(lambda _: "muon", tree))
        found: dict[Any, Any] = {}
        keys = []
        for name, shape in leaves:
            with errors_naming(name, shape):
                coeffs = of_leaf(name, shape)
                key = id(coeffs) if isinstance(coeffs, jax.Array) else coeffs
                if key not in found:
                    found[key] = resolve(coeffs), _named(coeffs)
            keys.append(key)
        order = {key: i for i, key in enumerate(found)}
        distinct, shown = zip(*found.values(), strict=True) if found else ((), ())
        return Iterations(distinct, shown, tuple(order[key] for key in keys))

    return of_tree


def check_patterns(ns_coeffs: NSCoeffs | CoeffsByPath, labels: Any) -> None:
    """Raises ValueError where a pattern decides no path of Muon's, although no leaf is masked.

    Args:
        ns_coeffs: as for `scale_by_muon`.
        labels: for each parameter the name of its optimizer.
    """
    named = jax.tree.leaves_with_path(labels)
    names = [path_name(path) for path, label in named if label == "muon"]
    patterns = ns_coeffs if isinstance(ns_coeffs, Mapping) else ()
    idle = [p for p in patterns if not any(re.search(p, name) for name in names)]
    if not names or has_masked(labels):
        return
    if idle:
        raise ValueError(
            f"the patterns {idle} of ns_coeffs match none of the {len(names)} parameters that"
            f" Muon has, such as {names[0]!r}: describe(params) prints all paths"
        )
    check_patterns_decide("ns_coeffs", patterns, names)


def map_by_iteration(
    iterations: Sequence[Iteration],
    numbers: Sequence[int],
    stacks: Sequence[Sequence[jax.Array]],
    max_group_bytes: int | None,
) -> list[jax.Array]:
    """Returns the polar factors of all stacks, one after the other.

    Args:
        iterations: the iterations.
        numbers: for each sequence of stacks, the index of its iteration.
        stacks: as for `Iteration.map`.
        max_group_bytes: as for `Iteration.map`.
    """
    flat = [(n, x) for n, each in zip(numbers, stacks, strict=True) for x in each]
    results: dict[int, jax.Array] = {}
    for number, iteration in enumerate(iterations):
        own = [i for i, (of_stack, _) in enumerate(flat) if of_stack == number]
        done = iteration.map([flat[i][1] for i in own], max_group_bytes)
        results |= zip(own, done, strict=True)
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
