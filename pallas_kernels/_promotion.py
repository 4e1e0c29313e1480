"""JAX's standard promotion of dtypes, under which both packages compute whatever a user has set."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """A context, and a decorator, in which dtypes promote as they do in JAX by default.

    It matters under `jax_numpy_dtype_promotion="strict"`, where JAX refuses a float32 sum of
    bfloat16 numbers. Where promotion is standard, nothing is set: JAX compiles a program once more
    for every setting.
    """
    if jax.config.jax_numpy_dtype_promotion == "standard":
        yield
    else:
        with jax.numpy_dtype_promotion("standard"):
            yield
