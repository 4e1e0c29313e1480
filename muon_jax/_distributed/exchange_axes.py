"""Over which mesh axes matrices are exchanged, and what happens over the others."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from muon_jax._checks import OUTSIDE, words_of
from muon_jax._distributed.sharding import check_axes

type Words = str | tuple[str, ...]
# One word, or two, for all mesh axes, or for each of some axes.
type Outside = Words | Mapping[str, Words]


class Choice(NamedTuple):
    """What happens over a mesh axis.

    Attributes:
        replicas: whether devices that have equal matrices repeat or split the work, or do what a
            model of the times finds faster.
        sharded: what becomes of matrices that the axis shards; None where they are exchanged.
        is_modeled: whether a model of the times chose `replicas`.
    """

    replicas: Literal["repeat", "split", "faster"] = "faster"
    sharded: Literal["raise", "gram", "block"] | None = "raise"
    is_modeled: bool = False


@dataclasses.dataclass(frozen=True)
class ExchangeAxes:
    """Over which mesh axes matrices are exchanged, and what happens over the others.

    Attributes:
        names: of the axes; None for all.
        named: pairs of an axis and its choice.
        others: the choice for all other axes.
    """

    names: tuple[str, ...] | None = None
    named: tuple[tuple[str, Choice], ...] = ()
    others: Choice = Choice()

    @classmethod
    def of_arguments(cls, exchange_axes: Words | None, outside: Outside) -> "ExchangeAxes":
        """Returns what the arguments of `scale_by_muon` say.

        Raises:
            ValueError: `outside` says what becomes of matrices over an axis that they are
                exchanged over.
        """
        names = (exchange_axes,) if isinstance(exchange_axes, str) else exchange_axes
        by_axis = outside if isinstance(outside, Mapping) else {}
        named = tuple((axis, _choice(words)) for axis, words in by_axis.items())
        found = cls(names, named, _choice(() if isinstance(outside, Mapping) else outside))
        wrong = [choice.sharded for axis, choice in named if names is None or axis in names]
        wrong += [found.others.sharded] if names is None else []
        for word in wrong:
            if word != "raise":
                raise ValueError(
                    f"outside={outside!r} says {word!r} of mesh axes that matrices are exchanged"
                    f" over, with exchange_axes={exchange_axes!r}: name there the other mesh axes"
                    f" alone, such as exchange_axes=('fsdp',), or leave out {word!r}"
                )
        return found

    def check_sums(self, argument: str, block_period: int | None) -> None:
        """Raises ValueError where matrices may be sharded over axes outside, in some steps or all.

        Args:
            argument: of the optimizer, which makes it sum over all mesh axes that shard a matrix.
            block_period: as for `scale_by_muon`.
        """
        if block_period not in (None, 1):
            raise ValueError(
                f"{argument} sums over all mesh axes that shard a matrix, and under"
                f" block_period={block_period} most steps exchange nothing: leave out {argument},"
                " or block_period"
            )
        for choice in (self.others, *(choice for _, choice in self.named)):
            if choice.sharded != "raise":
                raise ValueError(
                    f"{argument} sums over all mesh axes that shard a matrix, and"
                    f" outside={choice.sharded!r} allows such axes that exchange_axes leaves out:"
                    f" leave out {argument}, or {choice.sharded!r}"
                )

    def choice(self, axis: str) -> Choice:
        """Returns what happens over a mesh axis."""
        found = dict(self.named).get(axis, self.others)
        is_exchanged = self.names is None or axis in self.names
        return found._replace(sharded=None) if is_exchanged else found

    def decided(self, word: Literal["repeat", "split"]) -> "ExchangeAxes":
        """Returns the same with this word in place of `"faster"`."""

        def of_choice(choice: Choice) -> Choice:
            if choice.replicas != "faster":
                return choice
            return choice._replace(replicas=word, is_modeled=True)

        return self._map(of_choice)

    def repeated(self) -> "ExchangeAxes":
        """Returns the same with `"repeat"` for all axes."""
        return self._map(lambda choice: choice._replace(replicas="repeat"))

    def _map(self, of_choice: Callable[[Choice], Choice]) -> "ExchangeAxes":
        named = tuple((axis, of_choice(choice)) for axis, choice in self.named)
        return dataclasses.replace(self, named=named, others=of_choice(self.others))

    @property
    def is_decided(self) -> bool:
        """Whether no choice is left to the model of the times."""
        choices = (self.others, *dict(self.named).values())
        return all(choice.replicas != "faster" for choice in choices)

    def may_cut_blocks(self, mesh: Mapping[str, int]) -> bool:
        """Returns whether matrices may be blocks on the mesh; on one without axes, on any mesh."""
        choices = [self.others, *dict(self.named).values()]
        if mesh:
            choices = [self.choice(axis) for axis, size in mesh.items() if size > 1]
        return any(choice.sharded == "block" for choice in choices)

    def on_mesh(self, mesh: Mapping[str, int]) -> "ExchangeAxes":
        """Returns the same without the names of axes of other meshes."""
        names = None if self.names is None else tuple(name for name in self.names if name in mesh)
        named = tuple((name, choice) for name, choice in self.named if name in mesh)
        return dataclasses.replace(self, names=names, named=named)

    def check_names(self, mesh: Mapping[str, int]) -> None:
        """Raises ValueError where an axis is none of the mesh's."""
        check_axes("exchange_axes", self.names or (), mesh)
        check_axes("outside", dict(self.named), mesh)


def _choice(words: Words) -> Choice:
    """The choice of one word, or of two words."""
    found = {field: word for word in words_of(words) for field in OUTSIDE if word in OUTSIDE[field]}
    return Choice(**found)
