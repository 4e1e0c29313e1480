"""What `muon` will do with the parameters, as data and as a table, before it does it."""

import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from muon_jax import _muon, _presets
from muon_jax._iteration import grouping as _grouping
from muon_jax._iteration.form import implementation_of, of
from muon_jax._iteration.recipes import canonicalize
from muon_jax._matrices.by_role import routes
from muon_jax._matrices.views import assign, shapes_of_stacks
from muon_jax._reports.table import table
from muon_jax._trees import naming, path_name
from pallas_kernels import select_implementation, unsupported_reason
from pallas_kernels._syrk import check_supported


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter and what becomes of it.

    Attributes:
        path: its names, joined by slashes.
        shape: its own.
        role: what `by_role` takes it for, "unknown" where it could not tell.
        optimizer: "muon" or "adamw".
        matrices: the shapes `(batch, rows, cols)` of its stacks of matrices.
        groups: for each of these, which `Group` it is orthogonalized in.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    optimizer: str
    matrices: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """Matrices that are orthogonalized together.

    Attributes:
        shape: `(batch, m, n)` with m ≤ n.
        method: `"standard"` or `"gram"`.
        dtype: of the products.
        implementation: of the symmetric products.
        flops: of all products of an update, symmetric ones counted by half.
    """

    shape: tuple[int, ...]
    method: str
    dtype: str
    implementation: str
    flops: float


@dataclasses.dataclass(frozen=True)
class Description:
    """All parameters and groups; its string is the table."""

    parameters: tuple[Parameter, ...]
    groups: tuple[Group, ...]

    def __str__(self) -> str:
        parameters = [
            (
                p.path,
                _times(p.shape),
                p.role,
                p.optimizer,
                ", ".join(map(_times, p.matrices)),
                ", ".join(map(str, p.groups)),
            )
            for p in self.parameters
        ]
        groups = [
            (str(i), _times(g.shape), g.method, g.dtype, g.implementation, f"{g.flops / 1e9:.3g}")
            for i, g in enumerate(self.groups)
        ]
        return "\n\n".join(
            [
                table(("path", "shape", "role", "optimizer", "matrices", "group"), parameters),
                table(("group", "shape", "method", "dtype", "products", "GFLOP"), groups),
            ]
        )


def describe(params: Any, **arguments: Any) -> Description:
    """Prints and returns which parameters `muon` takes for matrices, and what it does with them.

    Args:
        params: the parameters, or shapes of them.
        **arguments: those of `muon`, without the learning rate; what does not concern the matrices
            is ignored.

    Raises:
        TypeError: `muon` has no such argument.
        ValueError: as `muon`, and `by_role` where it is used.
        NotImplementedError: the named implementation cannot run here.
    """
    given = all_arguments(arguments)
    leaves = jax.tree.leaves_with_path(params)
    named = [(path_name(path), leaf.shape) for path, leaf in leaves]
    views = assign(given["muon_weight_dimension_numbers"], params)
    stacks = [
        [] if view is None else _shapes_of_stacks(path, _momentum_of(x, given), view)
        for (path, x), view in zip(leaves, views, strict=True)
    ]
    flat = [*itertools.chain.from_iterable(stacks)]
    groups = _grouping.groups(flat, given["max_group_bytes"])
    group_of = {j: i for i, group in enumerate(groups) for j in group}
    positions = itertools.count()
    description = Description(
        tuple(
            Parameter(
                path=name,
                shape=shape,
                role=found.role if found else "unknown",
                optimizer="adamw" if view is None else "muon",
                matrices=tuple(stack.shape for stack in own),
                groups=tuple(group_of[next(positions)] for _ in own),
            )
            for (name, shape), view, own, found in zip(
                named, views, stacks, routes(named, {}), strict=True
            )
        ),
        tuple(_group([flat[i] for i in group], given) for group in groups),
    )
    print(description)
    return description


def all_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `muon`: these, those of their preset, and defaults.

    Raises:
        TypeError: `muon` has no such argument.
        ValueError: there is no such preset, or `muon` refuses an argument.
    """
    given = {**_presets.arguments_of(given.get("preset")), **given}
    call = inspect.signature(_muon.muon).bind(0.0, **given)
    _muon.muon(0.0, **given)
    call.apply_defaults()
    return call.arguments


def iteration(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those arguments of `muon` that decide the form, as `of` takes them."""
    return {
        "ns_coeffs": canonicalize(given["ns_coeffs"]),
        "ns_steps": given["ns_steps"],
        "dtype": given["ns_dtype"],
        "preconditioning": given["preconditioning"],
        "method": given["ns_method"],
    }


def _momentum_of(x, given):
    """What is orthogonalized for a parameter whose gradients have its dtype."""
    dtype = "float32" if given["mu_rounding"] == "stochastic" else given["mu_dtype"] or x.dtype
    return jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, dtype))


def _shapes_of_stacks(path, x, view):
    with naming(jax.tree_util.keystr(path), x.shape):
        return shapes_of_stacks(x, view)


def _group(stacks, given):
    batch = sum(stack.shape[0] for stack in stacks)
    m, n = sorted(stacks[0].shape[1:])
    form = of((batch, m, n), stacks[0].dtype, **iteration(given))
    operand = jax.ShapeDtypeStruct((batch, m, n), form.dtype)
    named = given["implementation"]
    if named:
        check_supported(named, unsupported_reason(named, operand))
    return Group(
        shape=operand.shape,
        method=form.method,
        dtype=str(form.dtype),
        implementation=named
        or implementation_of((m, n), form.dtype)
        or select_implementation(operand).implementation,
        flops=batch * m**3 * form.products.units(n / max(m, 1)),
    )


def _times(shape):
    return "×".join(map(str, shape))
