"""What the kernels have in common: they run on stacks, also under `vmap`, without derivatives."""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from pallas_kernels import device

type Arrays = tuple[jax.Array, ...]
type Function = Callable[..., Arrays]


def call_on_stacks(kernel: Function, implementation: str, *operands: Any, **options: Any) -> Arrays:
    """Returns `kernel(*operands, **options)`, with the batch shape of the first operand.

    The kernel gets all arrays with one batch axis, of length 1 where a matrix serves for all. Under
    `vmap` the stacks become longer, in the same launch.

    Args:
        kernel: computes stacks.
        implementation: its name, for the error when it is differentiated.
        operands: arrays, or trees of arrays. The first array has shape `(..., m, n)`. The others
            start with its batch shape, or with as many ones.
        options: for the kernel.
    """
    kernel = functools.partial(kernel, **options)

    def under_vmap(call: Function, size: int, in_batched: Any, *operands: Any) -> Arrays:
        first, is_batched = (jax.tree.leaves(tree)[0] for tree in (operands, in_batched))
        stack = first.shape[int(is_batched)]

        def merge(operand: jax.Array, batched: bool) -> jax.Array:
            operand = operand if batched else operand[None]
            operand = jnp.broadcast_to(operand, (size, stack, *operand.shape[2:]))
            return operand.reshape(-1, *operand.shape[2:])

        results = call(*jax.tree.map(merge, operands, in_batched))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results)

    batch = jax.tree.leaves(operands)[0].shape[:-2]
    stacks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), operands)
    results = with_rules(kernel, implementation, under_vmap)(*stacks)
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in results)


def with_rules(function: Function, implementation: str, under_vmap: Function) -> Function:
    """Returns the function with a rule for `vmap`, and an error for derivatives.

    `under_vmap(call, axis_size, in_batched, *operands)` may call what it is a rule of.
    """

    @jax.custom_batching.custom_vmap
    def call(*operands: Any) -> Arrays:
        return function(*operands)

    @call.def_vmap
    def _(size: int, in_batched: Sequence[Any], *operands: Any) -> tuple[Arrays, tuple[bool, ...]]:
        results = under_vmap(call, size, tuple(in_batched), *operands)
        return results, (True,) * len(results)

    @jax.custom_jvp
    def undifferentiable(*operands: Any) -> Arrays:
        return call(*operands)

    @undifferentiable.defjvp
    def _(primals: Any, tangents: Any) -> NoReturn:
        raise NotImplementedError(
            f"implementation={implementation!r} has no derivative: pass implementation='xla' to"
            " differentiate"
        )

    return undifferentiable


def jitted[F: Callable[..., Any]](launch: F) -> F:
    """Jits a launch, so that calls of equal shapes are traced and lowered once.

    Its arguments by name are static. `num_programs=None` is one for each multiprocessor.
    """
    parameters = inspect.signature(launch).parameters.values()
    static = [x.name for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY]
    jitted = jax.jit(launch, static_argnames=static)

    @functools.wraps(jitted)
    def call(*operands: Any, **options: Any) -> Any:
        if "num_programs" in static:
            options["num_programs"] = (
                options.get("num_programs") or device.current().num_multiprocessors
            )
        return jitted(*operands, **options)

    return call  # pyright: ignore[reportReturnType]


def padded(x: jax.Array, multiple: int) -> jax.Array:
    """Returns `(..., m, n)` with rows and columns of zeros added, up to multiples of a number."""
    rows, cols = ((0, -size % multiple) for size in x.shape[-2:])
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [rows, cols])


def stack_coefficients(
    coefficients: tuple[float | jax.Array, ...], batch: tuple[int, ...]
) -> jax.Array:
    """Returns scalars and arrays of shape `batch` as one float32 array `(*batch, number)`."""
    return jnp.stack(
        [jnp.broadcast_to(x, batch).astype(jnp.float32) for x in coefficients], axis=-1
    )


def call_together(
    together: Function, alone: Function, implementation: str, *operands: Any
) -> Arrays:
    """Returns `together(*operands)`, and under `vmap` what `alone` has, a launch for each stack."""

    def under_vmap(_: Function, size: int, in_batched: Any, *operands: Any) -> Arrays:
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        return jax.vmap(alone, axes, axis_size=size)(*operands)

    return with_rules(together, implementation, under_vmap)(*operands)


def ends_of(stacks: Sequence[jax.Array]) -> list[int]:
    """Returns where stacks end in an array of all, without the last one."""
    return [*itertools.accumulate(map(len, stacks[:-1]))]
