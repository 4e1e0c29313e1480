"""JAX's standard promotion of dtypes, under which both packages compute whatever a user has set."""

import contextlib
import functools
from collections.abc import Callable

import jax


def standard_promotion[**P, R]() -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator of functions in which dtypes promote as they do in JAX by default.

    It matters under `jax_numpy_dtype_promotion="strict"`, where JAX refuses a float32 sum of
    bfloat16 numbers. Where promotion is standard, nothing is set: JAX compiles a program once more
    for every setting.

    cloudpickle can pickle the decorated function. It cannot pickle one that a context manager of
    contextlib decorates, which keeps a generator.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            is_standard = jax.config.jax_numpy_dtype_promotion == "standard"
            with contextlib.nullcontext() if is_standard else jax.numpy_dtype_promotion("standard"):
                return function(*args, **kwargs)

        return wrapper

    return decorate
