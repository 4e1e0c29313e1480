"""Optimizer states in the memory of the host: where their arrays are, and how updates stream them.

An update takes one leaf after the other. Each comes to the device, is updated, and goes back:

    gradient i ─────────────────┐
    leaf i ─────────────────────┴──> on the device ──> result i
    earlier leaves, when back ──┘                 └──> leaf i, back on the host

-   A leaf waits for its gradient. XLA would fetch the whole state before the forward pass.
-   A leaf waits for earlier ones, so that a bounded number of bytes is under way. XLA would fetch
    all leaves before the first goes back.
"""

import collections
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
from jax.extend import backend

from muon_jax._distributed.sharding import is_in_shard_map, mesh_of

type MemoryKind = Literal["device", "pinned_host"]

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# Smaller arrays stay on the device. Their bytes do not matter, and each transfer takes some 10 µs.
LEAST_ENTRIES_ON_HOST = 2**16
# The bytes on each device that are under way at once, as many as of an exchange.
MOST_BYTES_UNDER_WAY = 2**28


def is_on_host(x: Any) -> bool:
    """Returns whether the type of an array says that it is in the memory of the host."""
    return jax.typeof(x).memory_space == HOST


def to_device(tree: Any) -> Any:
    """Returns the tree with all arrays on the device, sharded as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, DEVICE) if is_on_host(x) else x, tree)


def to_host(tree: Any) -> Any:
    """Returns the tree with all large arrays on the host, sharded as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, HOST) if _is_large(x) else x, tree)


def map_where_it_is(function: Callable[[Any], Any], stored: Any) -> Any:
    """Returns `function(stored)`, computed on the device, and on the host where `stored` is."""
    new = function(to_device(stored))
    return to_host(new) if _is_streamed(stored) else new


def map_leaf_by_leaf(
    function: Callable[..., tuple[Any, Any]],
    stored: Any,
    gradients: Any,
    *others: Iterable[Any],
    are_read_again: bool,
) -> tuple[Any, Any]:
    """Returns the trees of results and of new leaves that `function` makes of each leaf.

    New leaves go where the old ones are.

    Args:
        function: maps a leaf, its gradient and `others` of it to its result and the new leaf.
        stored: a tree of leaves, which are arrays or trees of arrays.
        gradients: a tree with one array in the place of each leaf.
        others: for each gradient, in their order.
        are_read_again: whether results are read more than once. They are then stored beside a leaf
            from the host: XLA would keep the new leaf on the device, to compute the result again.
    """
    flat, treedef = jax.tree.flatten(gradients)
    count_devices = 1 if is_in_shard_map() else max(1, mesh_of(flat).size)
    under_way: collections.deque[tuple[float, Any]] = collections.deque()
    pairs = []
    for old, gradient, *rest in zip(treedef.flatten_up_to(stored), flat, *others, strict=True):
        if not _is_streamed(old):
            pairs.append(function(old, gradient, *rest))
            continue
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(old)) / count_devices
        awaited = [gradient]
        while under_way and size + sum(s for s, _ in under_way) > MOST_BYTES_UNDER_WAY:
            awaited.append(under_way.popleft()[1])
        fetched = to_device(jax.lax.optimization_barrier((old, awaited))[0])
        result, new = function(fetched, gradient, *rest)
        if are_read_again:
            result, new = jax.lax.optimization_barrier((result, new))
        new = jax.tree.map(lambda x, o: jax.device_put(x, HOST) if is_on_host(o) else x, new, old)
        under_way.append((size, new))
        pairs.append((result, new))
    results, news = zip(*pairs, strict=True) if pairs else ((), ())
    return treedef.unflatten(results), treedef.unflatten(news)


def place_state(state: Any, memory_kind: MemoryKind) -> Any:
    """Returns the state that `init` made, with its large arrays in this memory.

    Raises:
        NotImplementedError: the default device cannot use pinned memory of its host.
    """
    if memory_kind == "device":
        return state
    device = backend.get_default_device()
    kinds = [memory.kind for memory in device.addressable_memories()]
    if memory_kind not in kinds:
        raise NotImplementedError(
            f"state_memory_kind={memory_kind!r} needs a device that can use such memory, got"
            f" {device.device_kind} with the memory kinds {kinds}: leave out state_memory_kind, and"
            " pass mu_dtype='bfloat16' or mu_dtype='int8' for a smaller state"
        )
    return to_host(state)


def check_memory(state: Any, memory_kind: MemoryKind) -> None:
    """Raises ValueError where an array of the state is not where `place_state` puts it."""
    if is_in_shard_map():  # where sizes are those of shards
        return
    for path, x in jax.tree.leaves_with_path(state):
        if is_on_host(x) != (memory_kind == "pinned_host" and _is_large(x)):
            where = "on the host" if memory_kind == "pinned_host" else "on the device"
            raise ValueError(
                f"state_memory_kind={memory_kind!r} needs the large arrays of the state {where},"
                f" got {jax.tree_util.keystr(path)} of type {jax.typeof(x)}: pass"
                " jax.tree.map(lambda x, like: jax.device_put(x, jax.typeof(like).memory_space),"
                " state, optimizer.init(params)), and the shardings of this state to"
                " jit(out_shardings=...)"
            )


def _is_large(x: Any) -> bool:
    return x.size >= LEAST_ENTRIES_ON_HOST


def _is_streamed(stored: Any) -> bool:
    return any(map(is_on_host, jax.tree.leaves(stored)))
