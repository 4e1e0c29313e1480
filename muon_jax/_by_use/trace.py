"""The program of a model: one trace of it, with errors in the words of `by_use`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from muon_jax._trees import OF_MODULES_IN_FN, any_missing, is_array
from pallas_kernels.arguments import shown


def traced(fn: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> Any:
    """Returns the closed jaxpr of `fn(params, *inputs)`.

    Raises:
        TypeError: an input, or what `fn` returns, is no array; or `fn` needs the value of an input.
        ValueError: `fn` returns nothing.
    """
    named = [
        (f"inputs{jax.tree_util.keystr(path)}", leaf)
        for path, leaf in jax.tree.leaves_with_path(inputs)
    ]
    for name, leaf in named:
        if not _is_traceable(leaf):
            raise TypeError(
                f"{name} must be an array or the shape of one, got {_short(leaf)}: bind it to fn,"
                " as in by_use(functools.partial(fn, mode='train'), params, x)"
            )

    def with_checked_outputs(params: Any, *inputs: Any) -> Any:
        outputs = fn(params, *inputs)
        for path, leaf in jax.tree.leaves_with_path(outputs):
            if not _is_traceable(leaf):
                raise TypeError(
                    f"fn must return arrays alone, got {_short(leaf)} at"
                    f" {jax.tree_util.keystr(path) or 'the root'}: return the loss or the outputs"
                )
        if not jax.tree.leaves(outputs):
            raise ValueError(
                f"fn must return what it computes of params, got {outputs!r}: return the loss or"
                " the outputs"
            )
        return outputs

    try:
        return jax.make_jaxpr(with_checked_outputs)(params, *inputs)
    except Exception as error:
        # JAX names the arguments whose values a program asks for.
        is_asked = isinstance(error, TypeError) and "concrete" in str(error).lower()
        for name, leaf in named:
            if is_asked and name in str(error) and np.ndim(leaf) == 0:
                raise TypeError(
                    f"fn needs the value of {name}, got {_short(leaf)}, and a trace has shapes"
                    " alone: bind it to fn, as in by_use(functools.partial(fn, train=True), params,"
                    " x)"
                ) from error
        if type(error).__name__ == "TraceContextError":
            error.add_note(f"by_use: state that fn changes must be an input: {OF_MODULES_IN_FN[1]}")
        elif "'NoneType' object is not callable" in str(error) and any_missing(params):
            error.add_note(
                "by_use: params has None where a module of Equinox has functions:"
                f" {OF_MODULES_IN_FN[0]}"
            )
        raise


def check_fn(fn: Any) -> None:
    """Raises TypeError where `fn` is no function."""
    if not callable(fn):
        raise TypeError(
            f"fn must be a loss or a forward pass, got {_short(fn)}: call by_use(fn, params,"
            " *inputs)"
        )


def _is_traceable(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, bool | np.bool_)


def _short(value: Any) -> str:
    """A value as errors show it, a tree by its type."""
    is_tree = not jax.tree_util.all_leaves([value])
    return f"a {type(value).__name__}" if is_tree and value is not None else shown(value)
