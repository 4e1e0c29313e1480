"""`Exchange`: what happens along each mesh axis to sharded matrices, and to replicas."""

import copy
import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, cast

import jax
import optax

from muon_jax._checks import BLOCK_GAIN, CheckedSchedule, check_fields
from muon_jax._distributed.cost import Link
from muon_jax._distributed.sharding import Shardings, check_axes, check_shardings
from muon_jax._matrices.views import ScaleOfBlocks
from pallas_kernels.arguments import check_name, shown

SHARDED = ("exchange", "gram", "gram_or_exchange", "block", "raise")
REPLICAS = ("faster", "repeat", "split")
type Words = str | tuple[str, ...]
type Axis = str | types.EllipsisType


class BlockStep(NamedTuple):
    """Whether a step under a period is a block step, whose updates are multiplied by the gain."""

    is_of_blocks: jax.Array
    gain: jax.typing.ArrayLike


@dataclasses.dataclass(frozen=True, repr=False)
class Exchange:
    """How sharded matrices are orthogonalized; pass it as `shardings`.

        muon(0.02, shardings=Exchange({"data": "split", "tensor": "gram"}))

    It is static. Only `block_gain` may be traced.

    Attributes:
        axes: what happens along mesh axes, a dict of words by their names. A word, or a tuple of
            one word from each table, stands for all axes; the key `...` stands for all others.
            Words that are left out have the default.

            Matrices that the axis shards:

            - default: they are exchanged whole, unless the Gram form of fewer matrices than devices
              is faster by a model of the times, and no device has a replica.
            - `"exchange"`: each is orthogonalized whole by one device.
            - `"gram_or_exchange"`: matrices stay sharded wherever they can, X = (X₁ X₂ …), while
              devices sum XXᵀ = Σᵢ XᵢXᵢᵀ. They run in the Gram form of `newton_schulz`, and differ
              from those on one device by the rounding of the sum. `Split` and `Unfold` are
              exchanged.
            - `"gram"`: nothing but Gram matrices is ever sent along the axis. The sum is over all
              axes that shard X, and its rows are the side that no such axis shards.
            - `"block"`: what devices with equal coordinates along such axes have of a matrix is a
              matrix of its own.
            - `"raise"`: an error.

            Replicas, which are devices along an axis that does not shard a parameter:

            - `"faster"`, the default: what a model of the times finds faster for all parameters.
              They repeat the work under `vmap`, in derivatives, and in a `shard_map` whose replicas
              may have gradients of their own.
            - `"repeat"`: each does all the work.
            - `"split"`: each does a share, and all-gathers bring the updates to all. On CPUs the
              bits are mostly those of `"repeat"`.
        links: a `Link` by mesh axis, for the model of the times; others are taken for NVLink.
        shardings: `PartitionSpec` or `NamedSharding` of each parameter, as in `scale_by_muon`.
        block_period: a period P (`MuonBP <https://arxiv.org/abs/2510.16981>`_). Steps 0, P, 2P, …
            are as without it. In all others each device orthogonalizes its own block of a matrix,
            and nothing is exchanged. A matrix that is not sharded does not depend on P.
        block_gain: what the updates of blocks are multiplied by in those other steps: the learning
            rate of blocks over `learning_rate`, a number or a schedule of the count.

    Raises:
        TypeError: an attribute has another type.
        ValueError: an attribute is none of the values above or out of range.
    """

    axes: Words | Mapping[Any, Words] = ()
    links: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    shardings: Shardings = None
    block_period: int | None = None
    block_gain: optax.ScalarOrSchedule = 1.0
    # The scale by shape that follows, which blocks have in place of their matrices.
    _scale_of_blocks: ScaleOfBlocks = "none"

    def __post_init__(self) -> None:
        check_fields(self)
        check_shardings(self.shardings)
        given = self.axes if isinstance(self.axes, Mapping) else {...: self.axes}
        axes = {axis: _checked(axis, words) for axis, words in given.items()}
        named = dict(sorted((k, words) for k, words in axes.items() if isinstance(k, str)))
        others = {...: axes[...]} if axes.get(...) else {}
        _check_links(self.links)
        object.__setattr__(self, "axes", named | others)
        object.__setattr__(self, "links", dict(sorted(self.links.items())))
        if callable(self.block_gain) and not isinstance(self.block_gain, CheckedSchedule):
            checked = CheckedSchedule("block_gain", BLOCK_GAIN, self.block_gain)
            object.__setattr__(self, "block_gain", checked)

    def __hash__(self) -> int:
        return hash((*self._along.items(), *self.links.items(), self.block_period))

    def __repr__(self) -> str:
        axes = {k: words[0] if len(words) == 1 else words for k, words in self._along.items()}
        shown_axes = repr(axes[...]) if [*axes] == [...] else repr(axes).replace("Ellipsis", "...")
        arguments, plain = [shown_axes] * bool(axes), Exchange()
        for name in ("links", "shardings", "block_period", "block_gain"):
            value, default = getattr(self, name), getattr(plain, name)
            if type(value) is not type(default) or value != default:  # which may be traced
                arguments.append(f"{name}={value!r}")
        return f"Exchange({', '.join(arguments)})"

    @property
    def _along(self) -> Mapping[Axis, tuple[str, ...]]:
        return cast(Any, self.axes)

    def sharded(self, axis: Axis) -> str | None:
        """Returns the word for matrices that a mesh axis shards, None for the default."""
        return self._word(axis, SHARDED)

    def replicas(self, axis: Axis) -> str:
        """Returns the word for replicas along a mesh axis."""
        return self._word(axis, REPLICAS) or "faster"

    def _word(self, axis: Axis, words: tuple[str, ...]) -> str | None:
        said = self._along.get(axis, self._along.get(..., ()))
        return next((word for word in said if word in words), None)

    def with_(self, **fields: Any) -> Self:
        """Returns the same with other values, which no check takes."""
        made = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def _map(self, words: Callable[[str | None, str], tuple[str | None, str]]) -> Self:
        """The same with the words that the function makes of those for matrices and replicas."""
        pairs = {k: words(self.sharded(k), self.replicas(k)) for k in [*self._along, ...]}
        return self.with_(axes={k: tuple(filter(None, pair)) for k, pair in pairs.items()})

    def repeated(self, *words: str) -> Self:
        """Returns the same with `"repeat"` in place of these words for replicas."""
        return self._map(lambda of, own: (of, "repeat" if own in words else own))

    def of_blocks(self) -> Self:
        """Returns what happens in block steps, which exchange nothing."""
        return self._map(lambda _, own: ("block", "repeat" if own == "repeat" else "faster"))

    def on_mesh(self, mesh: Mapping[str, int]) -> Self:
        """Returns the same without the names of axes of other meshes."""
        axes = {k: words for k, words in self._along.items() if k is ... or k in mesh}
        return self.with_(axes=axes, links={k: x for k, x in self.links.items() if k in mesh})

    def check_names(self, mesh: Mapping[str, int]) -> None:
        """Raises ValueError where an axis is none of the mesh's."""
        check_axes("axes of Exchange", [k for k in self._along if isinstance(k, str)], mesh)
        check_axes("links of Exchange", self.links, mesh)

    def check_sums(self, argument: str) -> None:
        """Raises ValueError where this argument of the optimizer could not sum over all axes."""
        found = [word for word in map(self.sharded, self._along) if word in ("gram", "block")]
        words = [f"{word!r}" for word in found]
        words += [f"block_period={self.block_period}"] * self.has_block_steps
        if words:
            raise ValueError(
                f"{argument} sums over all mesh axes that shard a matrix, and {words[0]} of"
                f" Exchange sends nothing else over some: leave out {argument}, or {words[0]}"
            )

    def may_cut_blocks(self, mesh: Mapping[str, int]) -> bool:
        """Returns whether matrices may be blocks on the mesh; on one without axes, on any mesh."""
        axes = [k for k, size in mesh.items() if size > 1] if mesh else [*self._along, ...]
        return "block" in map(self.sharded, axes)

    @property
    def needs_shardings(self) -> bool:
        """Whether it says what only known shardings can tell."""
        words = {word for k in self._along for word in (self.sharded(k), self.replicas(k))}
        return not words <= {None, "exchange", "faster", "repeat"}

    @property
    def has_block_steps(self) -> bool:
        """Whether some steps are of blocks, by a period."""
        return self.block_period not in (None, 1)

    def step(self, count: jax.Array) -> BlockStep:
        """Returns what step `count` = 0, 1, … of a period is."""
        gain = self.block_gain(count) if callable(self.block_gain) else self.block_gain
        return BlockStep(count % int(self.block_period or 1) != 0, gain)


def exchange_of(shardings: Any) -> Exchange:
    """Returns what the argument `shardings` of an optimizer says: it is one, or shardings."""
    return shardings if isinstance(shardings, Exchange) else Exchange(shardings=shardings)


def _checked(axis: Any, words: Any) -> tuple[str, ...]:
    """The words, those for sharded matrices first."""
    if axis is not ... and not isinstance(axis, str):
        raise TypeError(
            f"axes of Exchange must have words by the names of mesh axes, got {shown(axis)}: pass"
            " Exchange({'replica': 'split'}), for example"
        )
    what = "axes of Exchange" if axis is ... else f"axes[{axis!r}] of Exchange"
    words = words if isinstance(words, tuple) else (words,)
    for word in words:
        check_name(what, word, SHARDED + REPLICAS)
    if any(sum(word in choices for word in words) > 1 for choices in (SHARDED, REPLICAS)):
        raise ValueError(
            f"{what} must have one of {SHARDED} at most and one of {REPLICAS} at most, got"
            f" {words!r}: leave out one word"
        )
    return tuple(word for word in SHARDED + REPLICAS if word in words)


def _check_links(links: Any) -> None:
    is_dict = isinstance(links, Mapping)
    if not is_dict or not all(isinstance(k, str) and isinstance(x, Link) for k, x in links.items()):
        raise TypeError(
            f"links of Exchange must be a dict of Link by the names of mesh axes, got"
            f" {shown(links)}: pass links={{'data': Link(bandwidth=50e9)}}, for example"
        )
