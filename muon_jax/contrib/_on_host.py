"""Optimizer states in the host's memory: which arrays are there, and how updates stream them.

An update handles one leaf after another. Each moves to the device, is updated, and moves back:

    gradient i ─────────────────┐
    leaf i ─────────────────────┴──> on the device ──> result i
    earlier leaves, when back ──┘                 └──> leaf i, back on the host

-   A leaf waits for its gradient. Otherwise XLA would fetch the whole state before the forward
    pass.
-   A leaf waits for earlier ones, to bound the bytes in transit. Otherwise XLA would fetch all
    leaves before the first moves back.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import backend

from muon_jax._checks import checks_arguments
from muon_jax._distributed.sharding import is_in_shard_map, mesh_of
from muon_jax._transforms.momentum import Memory, Storage, storage_of

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# Smaller arrays stay on the device: their bytes do not matter, and each transfer takes some 10 µs.
LEAST_ENTRIES_ON_HOST = 2**16
# The bytes in transit at once on each device, as many as an exchange has.
MOST_BYTES_UNDER_WAY = 2**28


@checks_arguments
def on_host(mu_dtype: jax.typing.DTypeLike | Storage | None = None) -> Storage:
    """Returns a `mu_dtype` that keeps large moments in the pinned memory of the host.

        muon(0.02, mu_dtype=contrib.on_host("bfloat16"))

    This holds for Muon's and AdamW's moments of 65,536 or more entries. Updates stream them: each
    moves to the device when its gradient is ready, is updated, and moves back. At most 256 MiB, or
    one moment, are in transit on each device. The results are bit for bit the same.

    Args:
        mu_dtype: as for `muon`, also `"int8"`.

    Raises:
        ValueError: `mu_dtype` is not such a dtype; or, in `update`, the state is elsewhere.
        NotImplementedError: in `init`: the device cannot use pinned memory of its host.
    """
    return dataclasses.replace(storage_of(mu_dtype), memory=PinnedHost())


def is_on_host(x: Any) -> bool:
    """Returns whether the type of an array says that it is in the memory of the host."""
    return jax.typeof(x).memory_space == HOST


def to_device(tree: Any) -> Any:
    """Returns the tree with all arrays on the device, sharded as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, DEVICE) if is_on_host(x) else x, tree)


def map_where_it_is(function: Callable[[Any], Any], stored: Any) -> Any:
    """Computes `function(stored)` on the device, and moves it to the host if `stored` is there."""
    new = function(to_device(stored))
    return _to_host(new) if _is_streamed(stored) else new


@dataclasses.dataclass(frozen=True)
class PinnedHost(Memory):
    """Large arrays are in the pinned memory of the host."""

    def is_on_host(self, x: Any) -> bool:
        """Returns whether the array is large."""
        return x.size >= LEAST_ENTRIES_ON_HOST

    def place(self, state: Any) -> Any:
        """Returns a new state, sharded as it is, with its large arrays on the host.

        Raises:
            NotImplementedError: the default device cannot use pinned memory of its host.
        """
        device = backend.get_default_device()
        kinds = [memory.kind for memory in device.addressable_memories()]
        if "pinned_host" not in kinds:
            raise NotImplementedError(
                "on_host needs a device that can use pinned memory of its host, got"
                f" {device.device_kind} with the memory kinds {kinds}: pass mu_dtype='bfloat16' or"
                " mu_dtype='int8' for a smaller state"
            )
        return _to_host(state)

    def fetch(self, tree: Any) -> Any:
        """Returns the tree on the device."""
        return to_device(tree)

    def streamed(
        self, update: Callable[..., tuple[Any, Any]], gradients: Sequence[Any], are_read_again: bool
    ) -> Callable[..., tuple[Any, Any]]:
        """Returns `update` for leaves on the host, which move back there.

        A barrier stores results that are read again. Without it XLA would keep the new leaf on the
        device to recompute the result.
        """
        count_devices = 1 if is_in_shard_map() else max(1, mesh_of(gradients).size)
        under_way: collections.deque[tuple[float, Any]] = collections.deque()

        def streaming(old: Any, gradient: Any, *rest: Any) -> tuple[Any, Any]:
            if not _is_streamed(old):
                return update(old, gradient, *rest)
            size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(old)) / count_devices
            awaited = [gradient]
            while under_way and size + sum(s for s, _ in under_way) > MOST_BYTES_UNDER_WAY:
                awaited.append(under_way.popleft()[1])
            fetched = to_device(jax.lax.optimization_barrier((old, awaited))[0])
            result, new = update(fetched, gradient, *rest)
            if are_read_again:
                result, new = jax.lax.optimization_barrier((result, new))
            new = jax.tree.map(
                lambda x, o: jax.device_put(x, HOST) if is_on_host(o) else x, new, old
            )
            under_way.append((size, new))
            return result, new

        return streaming


def _to_host(tree: Any) -> Any:
    is_large = PinnedHost().is_on_host
    return jax.tree.map(lambda x: jax.device_put(x, HOST) if is_large(x) else x, tree)


def _is_streamed(stored: Any) -> bool:
    return any(map(is_on_host, jax.tree.leaves(stored)))
