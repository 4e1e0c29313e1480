"""`describe`: what `muon` will do with the parameters, as data and as a table."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from muon_jax._by_use.by_use import Routes
from muon_jax._checks import checks_arguments
from muon_jax._iteration.grouping import groups
from muon_jax._iteration.newton_schulz import NewtonSchulz
from muon_jax._matrices.by_role import by_role, named_shapes, routes
from muon_jax._matrices.parts import parts_of
from muon_jax._matrices.roles import NamedShape
from muon_jax._matrices.views import View
from muon_jax._muon import muon
from muon_jax._reports.arguments import (
    all_arguments,
    iterations_of_muon,
    matrices_of_muon,
    views_of_muon,
)
from muon_jax._table import table
from muon_jax._transforms.momentum import Storage, storage_of
from muon_jax._trees import errors_naming
from pallas_kernels import select_implementation, unsupported_reason
from pallas_kernels.arguments import check_supported, standard_promotion


@dataclasses.dataclass(frozen=True)
class DescribedParameter:
    """A parameter and what becomes of it.

    Attributes:
        path: its names, joined by slashes.
        shape: its own.
        role: what `by_use` saw it used for, and why; or what `by_role` takes it for, "unknown" if
            nothing tells, or the rule that decides.
        optimizer: "muon" or "adamw", or what else has it, such as "adamh".
        matrices: the shapes `(batch, rows, cols)` of its stacks of matrices.
        groups: for each of these, which group it is orthogonalized in.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    optimizer: str
    matrices: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DescribedGroup:
    """Matrices that are orthogonalized together.

    Attributes:
        shape: `(batch, m, n)` with m ≤ n.
        coefficients: their name, or the numbers.
        method: `"standard"` or `"gram"`.
        dtype: of the products.
        implementation: of the symmetric products.
        flops: of all products of an update; a symmetric product counts half.
    """

    shape: tuple[int, ...]
    coefficients: str
    method: str
    dtype: str
    implementation: str
    flops: float


@dataclasses.dataclass(frozen=True)
class Description:
    """All parameters and groups; its string is the table."""

    parameters: tuple[DescribedParameter, ...]
    groups: tuple[DescribedGroup, ...]

    def __str__(self) -> str:
        parameters = [
            (
                p.path,
                _joined(p.shape),
                p.role,
                p.optimizer,
                ", ".join(map(_joined, p.matrices)),
                ", ".join(map(str, p.groups)),
            )
            for p in self.parameters
        ]
        groups = [
            (
                str(i),
                _joined(g.shape),
                g.coefficients,
                g.method,
                g.dtype,
                g.implementation,
                f"{g.flops / 1e9:.3g}",
            )
            for i, g in enumerate(self.groups)
        ]
        of_groups = ("group", "shape", "coefficients", "method", "dtype", "products", "GFLOP")
        return "\n\n".join(
            [
                table(("path", "shape", "role", "optimizer", "matrices", "group"), parameters),
                table(of_groups, groups),
            ]
        )


@checks_arguments
@standard_promotion()
def describe(params: Any, *, optimizer: Callable[..., Any] = muon, **arguments: Any) -> Description:
    """Prints and returns which parameters `muon` takes for matrices, and what it does with them.

    Matrices are those of one device. `explain` tells what mesh axes and an `Exchange` make of them.

    Args:
        params: the parameters, or shapes of them.
        optimizer: `muon`, or a function of `muon_jax.contrib` that takes its arguments.
        **arguments: those of the optimizer, by name. You can pass all arguments of your optimizer:
            `describe` ignores those that do not concern the matrices, such as `learning_rate`,
            which you can also leave out.

    Raises:
        TypeError: `muon` has no such argument, or its `init` refuses the parameters.
        ValueError: as `muon` and its `init`, and `by_role` where it is used.
        NotImplementedError: the named implementation cannot run here.
    """
    given, state = all_arguments("describe", optimizer, arguments, params)
    named = named_shapes(params)
    leaves = jax.tree.leaves_with_path(params)
    views = views_of_muon(given, params)
    iterations = iterations_of_muon(given, matrices_of_muon(params, views))
    stacks = [
        [] if view is None else _stacks_of(path, _momentum_of(x, given), view)
        for (path, x), view in zip(leaves, views, strict=True)
    ]
    flat = [*itertools.chain.from_iterable(stacks)]
    of_muon = [own for own, view in zip(stacks, views, strict=True) if view is not None]
    numbers = [n for n, own in zip(iterations.of_leaves, of_muon, strict=True) for _ in own]
    grouped = _grouped(iterations.distinct, numbers, flat)
    group_of = {j: i for i, (_, group) in enumerate(grouped) for j in group}
    positions = itertools.count()
    labels = _optimizers(state, params, storage_of(given["mu_dtype"]))
    parameters = [
        DescribedParameter(
            path=name,
            shape=shape,
            role=role,
            optimizer=label,
            matrices=tuple(stack.shape for stack in own),
            groups=tuple(group_of[next(positions)] for _ in own),
        )
        for (name, shape), label, own, role in zip(
            named, labels, stacks, _roles(named, given), strict=True
        )
    ]
    described = [
        _described_group(
            [flat[j] for j in group], iterations.distinct[number], iterations.names[number]
        )
        for number, group in grouped
    ]
    description = Description(tuple(parameters), tuple(described))
    print(description)
    return description


def _optimizers(state: Any, params: Any, storage: Storage) -> list[str]:
    """The optimizer of each parameter: the one whose state has a momentum for it."""

    def has_momenta(node: Any) -> bool:
        return hasattr(node, "mu")

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    treedef = jax.tree.structure(params)
    found = [""] * treedef.num_leaves
    for label, inner in state.inner_states.items():
        nodes = jax.tree.leaves(inner, is_leaf=has_momenta)
        (mu,) = (node.mu for node in nodes if has_momenta(node))
        for i, m in enumerate(treedef.flatten_up_to(storage.unpack(mu))):
            if not any(map(is_masked, jax.tree.leaves(m, is_leaf=is_masked))):
                found[i] = "adamw" if label == "adam" else label
    return found


def _grouped(
    iterations: Sequence[NewtonSchulz],
    numbers: Sequence[int],
    stacks: Sequence[jax.ShapeDtypeStruct],
) -> list[tuple[int, list[int]]]:
    """The number of the iteration of each group, and the indices of its stacks."""
    found = []
    for number in sorted({*numbers}):
        own = [i for i, of_stack in enumerate(numbers) if of_stack == number]
        of_own = groups([stacks[i] for i in own], iterations[number].max_group_bytes)
        found += [(number, [own[i] for i in group]) for group in of_own]
    return found


def _roles(named: Sequence[NamedShape], given: dict[str, Any]) -> list[str]:
    """What each parameter is for: as `by_use` saw it, or else as `by_role` says."""
    views = given["muon_weight_dimension_numbers"]
    if isinstance(views, Routes):
        return [f"{views[name].role}: {views[name].reason}" for name, _ in named]
    is_by_role = isinstance(views, functools.partial) and views.func is by_role
    arguments = {"rules": None, **(views.keywords if is_by_role else {})}
    return [route.role for route in routes(named, **arguments)]


def _momentum_of(x: Any, given: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """What is orthogonalized for a parameter whose gradients have its dtype."""
    computed = storage_of(given["mu_dtype"]).computed_dtype or x.dtype
    dtype = "float32" if given["mu_rounding"] == "stochastic" else computed
    return jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, dtype))


def _stacks_of(
    path: tuple[Any, ...], x: jax.ShapeDtypeStruct, view: View
) -> list[jax.ShapeDtypeStruct]:
    with errors_naming(jax.tree_util.keystr(path), x.shape):
        return [jax.ShapeDtypeStruct(part.stack, x.dtype) for part in parts_of(view, x.shape)]


def _described_group(
    stacks: Sequence[jax.ShapeDtypeStruct], iteration: NewtonSchulz, coefficients: str
) -> DescribedGroup:
    batch = sum(stack.shape[0] for stack in stacks)
    m, n = sorted(stacks[0].shape[1:])
    form = iteration.form((m, n), stacks[0].dtype)
    operand = jax.ShapeDtypeStruct((batch, m, n), form.dtype)
    named = iteration.implementation
    if named:
        check_supported(named, unsupported_reason(named, operand))
    return DescribedGroup(
        shape=operand.shape,
        coefficients=coefficients,
        method=form.method,
        dtype=str(form.dtype),
        implementation=form.implementation or select_implementation(operand).implementation,
        flops=batch * m**3 * form.products.units(n / max(m, 1)),
    )


def _joined(shape: Sequence[int]) -> str:
    """The sizes joined by ×."""
    return "×".join(map(str, shape))
