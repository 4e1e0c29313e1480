"""Trees of parameters: paths, prefixes, missing leaves, and checks of where two trees differ.

Regular expressions of paths, too: the first that matches a path decides for it.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_jax._foreign import is_transformation

type Path = tuple[Any, ...]

# The parameters of a module of Equinox, and of nnx: alone, and where a function takes them.
_OF_MODULES = ("eqx.filter(model, eqx.is_array)", "params = nnx.state(model, nnx.Param)")
OF_MODULES_IN_FN = (
    "params, static = eqx.partition(model, eqx.is_inexact_array) (in fn: model ="
    " eqx.combine(params, static))",
    "graph, params, rest = nnx.split(model, nnx.Param, ...) (in fn, with rest as an input: model ="
    " nnx.merge(graph, params, rest))",
)
# What is often passed in the place of parameters, by an attribute, and what to pass.
_NO_PARAMS = {
    "opt_state": "the parameters alone, such as train_state.params",
    "inner_states": "the parameters, not the state",
    "init_with_output": "params = model.init(key, x)['params']",
    "named_parameters": "a tree of JAX's arrays, such as a dict of them",
}


def check_params(
    params: Any,
    call: str = "optimizer.init(params)",
    of_modules: tuple[str, str] = _OF_MODULES,
) -> None:
    """Raises TypeError where there is no tree, or a leaf is no array, shape of one, or number.

    Args:
        params: what a function got for parameters.
        call: the right call of the function, for errors.
        of_modules: how to get parameters of a module of Equinox, and of nnx, for errors.
    """
    of_equinox, of_nnx = of_modules
    if params is None:
        raise TypeError(
            f"params must be a tree of arrays or of their shapes, got None: call {call}"
        )
    wrong = [what for attribute, what in _NO_PARAMS.items() if hasattr(params, attribute)]
    if is_transformation(params):
        wrong = ["the parameters, not an optimizer"]
    elif jax.tree_util.all_leaves([params]) and not is_array(params):
        wrong = wrong or ["a tree of arrays, such as a dict of them"]
    elif _has_untrained(params):
        wrong = [of_nnx]
    if wrong:
        raise TypeError(
            f"params must be a tree of arrays or of their shapes, got a {type(params).__name__}:"
            f" call {call} with {wrong[0]}"
        )
    for path, leaf in jax.tree.leaves_with_path(params):
        if not is_array(leaf):
            raise TypeError(
                f"the parameter {jax.tree_util.keystr(path)} must be an array, got {leaf!r}: leave"
                f" it out. For a module of Equinox call {of_equinox}, for one of nnx {of_nnx}"
            )


def _has_untrained(params: Any) -> bool:
    """Whether `params` is a module of nnx with variables that are not trained."""
    if not any(c.__module__.startswith("flax.nnx") for c in type(params).__mro__):
        return False
    variables = jax.tree.leaves(params, is_leaf=lambda node: hasattr(node, "get_metadata"))
    names = {c.__name__ for variable in variables for c in type(variable).__mro__}
    return hasattr(params, "sow") and bool(names & {"BatchStat", "RngState", "Cache"})


def check_floats(params: Any) -> None:
    """Raises ValueError where a parameter is not of a float dtype of 16 bits or more."""
    for path, leaf in jax.tree.leaves_with_path(params):
        name, dtype = f"the parameter {jax.tree_util.keystr(path)}", dtype_of(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"{name} must have a float dtype, got {dtype}: name it None in"
                " muon_weight_dimension_numbers, or leave it out of the parameters"
            )
        _check_bits(name, dtype)


def _check_bits(name: str, dtype: np.dtype) -> None:
    if jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"{name} must have 16 bits or more, got {dtype}: train a copy of the parameters in"
            " bfloat16 or float32"
        )


def check_mu_dtype(params: Any, mu_dtype: jax.typing.DTypeLike | None) -> None:
    """Raises ValueError where `mu_dtype` is complex and a parameter is not, or conversely."""
    if mu_dtype is None:
        return
    for path, leaf in jax.tree.leaves_with_path(params):
        if jnp.issubdtype(mu_dtype, jnp.complexfloating) != _is_complex(leaf):
            raise ValueError(
                "mu_dtype must be real for real parameters and complex for complex ones, got"
                f" {jnp.dtype(mu_dtype)} for the parameter {jax.tree_util.keystr(path)}, which is"
                f" {dtype_of(leaf)}: pass mu_dtype=None"
            )


def check_state(updates: Any, state: Any, params: Any, field: str) -> None:
    """Raises TypeError where `state` lacks the field that the state of a transformation has.

    Args:
        updates: the first argument of `update`, where the state may be by mistake.
        state: the second one.
        params: the third one, where the state may be, too.
        field: the name of the field.
    """
    if not hasattr(state, field):
        places = {"first": updates, "third": params}
        found = [place for place, value in places.items() if hasattr(value, field)]
        where = f", and the state as the {found[0]} argument" if found else ""
        raise TypeError(
            f"state must be what init returned, with the field {field!r}, got a"
            f" {type(state).__name__}{where}: call update(updates, state, params) with state ="
            " optimizer.init(params)"
        )


def check_update(gradients: Any, params: Any) -> None:
    """Raises where gradients are no arrays of floats, or do not fit the parameters.

    Args:
        gradients: what `update` got.
        params: what `update` got, perhaps None.

    Raises:
        TypeError: a gradient is neither an array nor None.
        ValueError: a gradient is of integers or booleans, or of floats below 16 bits; or as
            `check_gradients`.
    """
    for path, gradient in jax.tree.leaves_with_path(gradients):
        name = f"the gradient {jax.tree_util.keystr(path)}"
        if not is_array(gradient):
            raise TypeError(f"{name} must be an array, got {gradient!r}: pass jnp.asarray of it")
        dtype = dtype_of(gradient)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                f"{name} must have a float dtype, got {dtype}: pass None where there is no"
                " gradient, and the parameter is skipped"
            )
        _check_bits(name, dtype)
    if params is not None:
        check_gradients(gradients, params, "the parameters")


def check_gradients(gradients: Any, like: Any, owner: str) -> None:
    """Raises ValueError unless each gradient has the place and the shape of its parameter.

    It also raises where a gradient is complex and its parameter is real.

    Args:
        gradients: arrays. None stands for all that is below it.
        like: the parameters, or their momenta.
        owner: what `like` is, for errors.
    """
    if jax.tree.structure(gradients) == jax.tree.structure(like):
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(like), strict=True)
        if all(np.shape(g) == np.shape(x) and not jnp.iscomplexobj(g) for g, x in pairs):
            return
    if difference := _first_difference(gradients, like, _compare_gradient, is_missing):
        path, left, right = difference
        raise ValueError(
            f"the gradients must have the tree and the shapes of {owner}: at {_shown(path)} the"
            f" gradients have {left}, {owner} {right}. Pass the gradients of the parameters that"
            " init got"
        )

    def check(path: Path, gradient: Any, of_owner: Any) -> None:
        if gradient is not None and _is_complex(gradient) and not _is_complex(of_owner):
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} is {dtype_of(gradient)}, but {owner}"
                f" there {dtype_of(of_owner)}: pass its real part, or complex parameters"
            )

    jax.tree.map_with_path(check, gradients, like, is_leaf=is_missing)


def check_prefix(argument: str, prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> None:
    """Raises ValueError unless `prefix` is a prefix of the parameters' tree.

    Args:
        argument: the name of `prefix`, for errors.
        prefix: the tree that may be a prefix.
        tree: the tree of the parameters.
        is_leaf: whether a node is a leaf of `prefix`.
    """
    try:
        jax.tree.map(lambda *_: None, prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        difference = _first_difference(prefix, tree, lambda *_: None, is_leaf)
        path, left, right = difference or ((), str(error), "another tree")
        raise ValueError(
            f"{argument} must be a tree like the parameters', or a prefix of it: at {_shown(path)}"
            f" {argument} has {left}, the parameters {right}"
        ) from None


def _first_difference(
    left: Any,
    right: Any,
    compare: Callable[[Any, Any], tuple[str, str] | None],
    is_leaf: Callable[[Any], bool],
    path: Path = (),
) -> tuple[Path, str, str] | None:
    """The first path at which two trees differ, and what each has there; None where none is.

    Args:
        left: a tree.
        right: a tree, of which a leaf of `left` may stand for a subtree.
        compare: returns what both have where `left` has a leaf and both differ.
        is_leaf: whether a node is a leaf of `left`.
        path: of both trees in the trees that the caller has.
    """
    if is_leaf(left) or jax.tree_util.all_leaves([left]):
        found = compare(left, right)
        return (path, *found) if found else None
    of_left, of_right = _children(left), _children(right)
    if type(left) is not type(right):
        return path, _described(left), _described(right)
    for key in {**of_left, **of_right}:
        if key not in of_left or key not in of_right:
            of_both = [_described(s[key]) if key in s else "nothing" for s in (of_left, of_right)]
            return (*path, key), of_both[0], of_both[1]
        found = _first_difference(of_left[key], of_right[key], compare, is_leaf, (*path, key))
        if found:
            return found
    return None


def _children(node: Any) -> dict[Any, Any]:
    """The children of a node by their keys, none of a leaf."""
    pairs = jax.tree.leaves_with_path(node, is_leaf=lambda inner: inner is not node)
    return {path[0]: child for path, child in pairs if path}


def _compare_gradient(gradient: Any, of_owner: Any) -> tuple[str, str] | None:
    if gradient is None or (
        is_array(gradient) and is_array(of_owner) and np.shape(gradient) == np.shape(of_owner)
    ):
        return None
    return _described(gradient), _described(of_owner)


def _described(node: Any) -> str:
    if is_array(node):
        return f"{dtype_of(node)}{[*np.shape(node)]}"
    if node is not None and not jax.tree_util.all_leaves([node]):
        return f"a {type(node).__name__}"
    return repr(node)


def _shown(path: Path) -> str:
    return jax.tree_util.keystr(path) or "the root"


def is_array(leaf: Any) -> bool:
    """Returns whether `leaf` is an array, the shape of one, or a number."""
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return is_number or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def dtype_of(leaf: Any) -> Any:
    """Returns the dtype of an array, of its shape alone, or of a number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _is_complex(leaf: Any) -> bool:
    return jnp.issubdtype(dtype_of(leaf), jnp.complexfloating)


# The last key of a path to an array in a box: Flax's `value`, and the only child of Haliax'.
_BOXES = (jax.tree_util.GetAttrKey("value"), jax.tree_util.FlattenedIndexKey(0))


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the names of a path joined by slashes, without the boxes of Flax and Haliax."""
    name = jax.tree_util.keystr(unboxed(path), simple=True, separator="/")
    return name.removeprefix("params/")


def unboxed(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the path without the box that Flax, or Haliax, may have around an array."""
    return path[:-1] if path and path[-1] in _BOXES else path


def is_box(node: Any) -> bool:
    """Returns whether `node` is a box of Flax around an array.

    Boxes are linen's, such as `Partitioned`, and the variables of nnx. They may hold the names of
    the mesh axes that each axis of the array is sharded over.
    """
    return hasattr(node, "replace") and (hasattr(node, "names") or hasattr(node, "get_metadata"))


@contextlib.contextmanager
def errors_naming(name: str, shape: tuple[int, ...]) -> Iterator[None]:
    """A context whose errors begin with the name and the shape of a parameter."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"the parameter {name} of shape {shape}: {error}") from error


def is_function(node: Any) -> TypeGuard[Callable[[Any], Any]]:
    """Returns whether `node` is a callable that makes a tree, and no tree that can be called.

    A tree in the shape of an Equinox module is a module, which may have `__call__`.
    """
    return callable(node) and jax.tree_util.all_leaves([node])


def broadcast_prefix[Node, Found](
    argument: str,
    convert: Callable[[tuple[Any, ...], Node], Found],
    prefix: Any,
    tree: Any,
    is_leaf: Callable[[Any], bool],
) -> list[Found]:
    """Returns `convert(path, node)` for each leaf of `tree`.

    `node` is the leaf of `prefix` that is at the leaf's place in `tree` or above it, and `path` is
    the path of `node`.

    Args:
        argument: the name of `prefix`, for errors.
        convert: called once for each leaf of `prefix`.
        prefix: a prefix of `tree`, or a callable that makes one from `tree`.
        tree: a tree in which None is no leaf. A tree without leaves has any prefix, because
            `optax.tree.map_params` passes a node of its own in the place of the parameters.
        is_leaf: whether a node is a leaf of `prefix`.

    Raises:
        ValueError: `prefix` is no prefix of `tree`.
    """
    if not jax.tree.leaves(tree):
        return []
    found = []

    def find(path: tuple[Any, ...], node: Node, subtree: Any) -> None:
        found.extend([convert(path, node)] * len(jax.tree.leaves(subtree)))

    prefix = prefix(tree) if is_function(prefix) else prefix
    check_prefix(argument, prefix, tree, is_leaf)
    jax.tree.map_with_path(find, prefix, tree, is_leaf=is_leaf)
    return found


def is_missing(node: Any) -> bool:
    """Returns whether a node of a tree of gradients is None, for a parameter without gradient."""
    return node is None


def any_missing(updates: optax.Updates) -> bool:
    """Returns whether there is None in the place of a gradient."""
    return any(map(is_missing, jax.tree.leaves(updates, is_leaf=is_missing)))


def fill_missing(updates: optax.Updates, values: Any) -> optax.Updates:
    """Returns `updates` with what `values` has in the places of None."""
    return jax.tree.map(lambda g, v: v if g is None else g, updates, values, is_leaf=is_missing)


def has_masked(tree: Any) -> bool:
    """Returns whether leaves of other optimizers were taken out of the tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    return any(isinstance(leaf, optax.MaskedNode) for leaf in leaves)


def first_match(patterns: Iterable[str], path: str) -> str | None:
    """Returns the first pattern that matches a path (`re.search`), None if there is none."""
    return next((pattern for pattern in patterns if re.search(pattern, path)), None)


def check_each_decides(
    argument: str,
    patterns: Iterable[str],
    paths: Sequence[str],
    whose: str = "parameters",
    mend: str = "",
) -> None:
    """Raises ValueError unless each pattern is the first that matches some path.

    Args:
        argument: what has the patterns, for errors.
        patterns: regular expressions.
        paths: the paths that the patterns may decide for.
        whose: what has these paths, for errors.
        mend: what else the caller can do, for errors.
    """
    matching = {p: [path for path in paths if re.search(p, path)] for p in patterns}
    if idle := [pattern for pattern, matched in matching.items() if not matched]:
        example = f", such as {paths[0]!r}" if paths else ""
        raise ValueError(
            f"the patterns {idle} of {argument} match none of the {len(paths)} {whose}{example}:"
            f" describe(params) prints all paths{mend}"
        )
    first = {path: first_match(matching, path) for path in paths}
    for pattern, matched in matching.items():
        takers = [p for p in matching if p in {first[path] for path in matched}]
        if pattern in takers:
            continue
        left = {first[path] for path in paths if path not in matched}
        first_of_all = f"put {pattern!r} first, or " if left >= {*takers} else ""
        raise ValueError(
            f"{argument}[{pattern!r}] never decides: {', '.join(map(repr, takers))} before it"
            f" already {'match' if len(takers) > 1 else 'matches'} all that it matches, such as"
            f" {matched[0]!r}: {first_of_all}leave it out"
        )
