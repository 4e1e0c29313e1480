"""Automatic mesh axes: an operation that runs its plan once the compiler has decided on shardings.

The plan is made when the compiler asks how to partition the operation (`custom_partitioning`).
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_kernels
from muon_jax._distributed.sharding import axes_of_entry
from pallas_kernels.device import standard_promotion

_PACKAGES = (Path(__file__).parents[1], Path(str(pallas_kernels.__file__)).parent)
# A function of shards, and of the arrays of an iteration, that runs a plan.
type Planned = Callable[[Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]


def run_when_partitioned(
    planned: Callable[[Sequence[PartitionSpec], Mapping[str, int]], Planned],
    unsharded: Planned,
    by_xla: Planned,
    of_stacks: Planned | None,
    leaves: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    settings: str,
) -> list[jax.Array]:
    """Returns the results of the plan for the shardings that the compiler has arrived at.

    | the program             | runs                                                          |
    | ----------------------- | ------------------------------------------------------------- |
    | is of several devices   | the plan                                                      |
    | is of one device        | `unsharded`                                                   |
    | takes a derivative      | `by_xla`                                                      |
    | maps leaves by `vmap`   | `of_stacks` once; without it `by_xla`, mapped                 |
    | maps arrays by `vmap`   | one run after the other; without `of_stacks` as for leaves    |

    JAX's cache of compiled programs knows operations of this kind by their operands alone. So a
    digest of all that decides what is compiled is an operand.

    Args:
        planned: makes the plan for specs on a mesh.
        unsharded: runs on arrays that are not sharded.
        by_xla: runs on whole arrays that XLA may have sharded.
        of_stacks: runs on leaves with one more axis in front; None where no mesh is known.
        leaves: whole arrays.
        arrays: of the iteration.
        settings: what else decides what is compiled, beside the library and JAX's settings.
    """
    if of_stacks is not None:  # the mesh is known, and has several devices
        _check_cache()
    precision = jax.config.jax_default_matmul_precision
    digest = np.uint32(zlib.crc32(repr((code_id(), precision, settings)).encode()))
    raised: list[Exception] = []
    operation = _operation(planned, unsharded, raised)

    def partitioned(leaves: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return operation(leaves, arrays, digest)

    run = with_rules(partitioned, by_xla, of_stacks, is_sequential=True)
    # Within `jit`, for the digest to be a constant of the program where an update is not jitted.
    try:
        return jax.jit(run)(leaves, arrays)
    except jax.errors.JaxRuntimeError:  # from the compiler, where no other `jit` is around
        if raised:
            raise raised[0] from None
        raise


@functools.cache
def code_id() -> str:
    """Returns what differs where the code that makes programs does.

    That is the version and the tables of measured times, which `pallas_kernels.tune` writes. Where
    the package is not installed, or is editable, the version says nothing: there it is a digest.
    """
    version = _installed_version()
    found = hashlib.sha256(version.encode())
    for root in _PACKAGES:
        sources = [] if version else root.rglob("*.py")
        for path in sorted([*sources, *root.glob("tuned/*.json")]):
            found.update(path.read_bytes())
    return found.hexdigest()


def _installed_version() -> str:
    """The version of the distribution that this code is of, empty where there is none."""
    try:
        distribution = importlib.metadata.distribution("muon-jax")
    except importlib.metadata.PackageNotFoundError:
        return ""
    installed = Path(str(distribution.locate_file(_PACKAGES[0].name)))
    return distribution.version if installed.resolve() == _PACKAGES[0].resolve() else ""


def _check_cache() -> None:
    """Warns if JAX's persistent cache is on, but never finds programs with such an operation."""
    config = jax.config
    is_on = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    if is_on and not config.jax_remove_custom_partitioning_ptr_from_cache_key:
        _warn_of_cache()


@functools.cache
def _warn_of_cache() -> None:
    """Warns once in a process."""
    warnings.warn(
        "JAX's persistent compilation cache is on, but it never finds the programs that update"
        " parameters on automatic mesh axes, because their keys contain a memory address. Add"
        " jax.config.update('jax_remove_custom_partitioning_ptr_from_cache_key', True)",
        stacklevel=3,
    )


def with_rules(
    run: Planned, by_xla: Planned, of_stacks: Planned | None, *, is_sequential: bool = False
) -> Planned:
    """Returns `run` with rules for `vmap` and derivatives, which its exchanges do not have."""
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def _(
        axis_size: int,
        in_batched: Sequence[Any],
        leaves: Sequence[jax.Array],
        arrays: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[bool]]:
        mapped_leaves, mapped_arrays = in_batched
        in_axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(in_batched))
        if of_stacks is None or (any(mapped_arrays) and not is_sequential):
            results = jax.vmap(by_xla, in_axes)(leaves, arrays)
        elif any(mapped_arrays):
            sequential = jax.custom_batching.sequential_vmap(run)
            results = jax.vmap(sequential, in_axes)(leaves, arrays)
        else:
            stacks = [
                x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
                for x, is_mapped in zip(leaves, mapped_leaves, strict=True)
            ]
            results = of_stacks(stacks, arrays)
        return results, [True] * len(results)

    with_derivative = jax.custom_jvp(lambda leaves, arrays: mapped(leaves, arrays))
    with_derivative.defjvp(lambda primals, tangents: jax.jvp(by_xla, primals, tangents))
    return with_derivative


def _operation(
    planned: Callable[[Sequence[PartitionSpec], Mapping[str, int]], Planned],
    unsharded: Planned,
    raised: list[Exception],
) -> Callable[..., list[jax.Array]]:
    """The operation `(leaves, arrays, digest) -> results` that the compiler partitions.

    The compiler raises errors of its own, so `raised` gets ours.
    """

    @custom_partitioning
    def operation(
        leaves: Sequence[jax.Array], arrays: Sequence[jax.Array], _: jax.Array
    ) -> list[jax.Array]:
        return unsharded(leaves, arrays)

    @standard_promotion()
    def partition(mesh: jax.sharding.Mesh, operands: Any, results: Any) -> tuple[Any, ...]:
        del results
        leaves, arrays, _ = operands
        if mesh.size > 1:
            _check_cache()
        with _kept_in(raised):
            shardings = [NamedSharding(mesh, _even_spec(x, mesh)) for x in leaves]
            replicated = NamedSharding(mesh, PartitionSpec())
            run = planned([s.spec for s in shardings], mesh.shape)

        @standard_promotion()  # XLA traces this long after `update` has returned
        def of_shards(
            leaves: Sequence[jax.Array], arrays: Sequence[jax.Array], _: jax.Array
        ) -> list[jax.Array]:
            in_force = jax.sharding.get_abstract_mesh()  # its explicit axes would be in all types
            types = dict.fromkeys(in_force.axis_names, AxisType.Auto)
            with (
                _kept_in(raised),
                jax.sharding.use_abstract_mesh(in_force.update_axis_types(types)),
            ):
                return run(leaves, arrays)

        return mesh, of_shards, shardings, (shardings, [replicated] * len(arrays), replicated)

    def rule(mesh: jax.sharding.Mesh, operands: Any, results: Any) -> SdyShardingRule:
        """Each result is sharded like its leaf, whatever the others."""
        del mesh
        names = (f"i{i}" for i in itertools.count())
        mappings = [ArrayMapping(*itertools.islice(names, len(x.shape))) for x in operands]
        return SdyShardingRule(tuple(mappings), tuple(mappings[: len(results)]))

    operation.def_partition(partition, sharding_rule=rule)
    return operation


@contextlib.contextmanager
def _kept_in(raised: list[Exception]) -> Iterator[None]:
    """Adds the error to the list that leaves the block, if any."""
    try:
        yield
    except Exception as error:
        raised.append(error)
        raise


def _even_spec(x: Any, mesh: jax.sharding.Mesh) -> PartitionSpec:
    """The spec of an operand, without the mesh axes that would shard it unevenly."""
    if x.sharding.is_fully_replicated:  # and of no mesh, perhaps, where no argument is on one
        return PartitionSpec()
    if not isinstance(x.sharding, NamedSharding):
        raise ValueError(
            f"the mesh that a parameter of shape {x.shape} is sharded over, {x.sharding}, cannot be"
            " known, as no argument of the program is on it: pass shardings=, or put one there"
        )

    def cuts(entry: Any) -> int:
        return math.prod(mesh.shape[name] for name in axes_of_entry(entry))

    entries = zip(x.sharding.spec, x.shape, strict=True)
    return PartitionSpec(*(None if size % cuts(entry) else entry for entry, size in entries))
