"""The role of each parameter, from what products and other operations do with it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from muon_jax._by_use.follow import Follower, Product, Value
from muon_jax._by_use.pieces import Shape, size_of
from muon_jax._by_use.views import Digit, labels_of_parts, view_of_use
from muon_jax._matrices.rules import Route
from muon_jax._matrices.views import View

# What a model uses a parameter for, and why AdamW has it, or its matrices.
MUON = ("hidden", "input")
REASONS = {
    "embedding": "rows are looked up in it",
    "latents": "it stands in the place of an activation",
    "factor": "it is multiplied with another parameter, or only linear operations are between",
    "depthwise": "each filter has one input",
    "vector": "it is used entry by entry",
    "unused": "it has no effect on the outputs",
    "router": "its outputs choose, as among experts",
    "output": "no product with a parameter follows",
}


type Way = tuple[tuple[Digit, ...], ...]  # the digits of each axis of a parameter in a product


class Roles:
    """The roles of all parameters of a program that was followed to its outputs."""

    def __init__(
        self,
        follower: Follower,
        outputs: Sequence[Value],
        paths: Sequence[str],
        shapes: Sequence[Shape],
    ) -> None:
        self._facts, self._paths, self._shapes = follower.facts, paths, shapes
        self._products = follower.products
        self._uses = _by_first(self._facts["use"])
        self._outputs = _by_first(self._facts["output"])
        self._followers = _by_first(fact[:2] for fact in self._facts["followed"])
        self._heads = _by_first((leaf, (*head,)) for leaf, *head in self._facts["head"])
        self._taken = _by_first(self._facts["taken"])
        self._gated = _by_first(self._facts["gated"])
        self._seen = _by_first((j, (*seen,)) for j, *seen in self._facts["product"])
        self._products_of = _by_first((self._products[j].leaf, j) for j in self._seen)
        reached = frozenset().union(*(x.as_activation().frontier for x in outputs))
        self._last = {
            j for j in reached if "contracted" not in self._outputs[j] and j not in self._followers
        }
        self._routers = {
            self._products[j].leaf
            for j, how in self._outputs.items()
            if j not in self._last
            and ("argmax" in how or how >= {"sort", "experts"} or self._is_softmax_router(j))
        }
        self._latents, self._factors = self._latents_and_factors()
        # Of a function that takes a derivative of outputs that it does not use.
        self._in_backward_alone = {
            leaf
            for (leaf,) in self._facts["backward"]
            if not (self._uses[leaf] or self._products_of[leaf])
        }
        # There a matrix that is not seen may follow these.
        hides = any(len(shapes[leaf]) > 1 for leaf in self._in_backward_alone)
        self._maybe_last = {j for (j,) in self._facts["differentiated"] if hides}
        self._experts = self._axes_of_experts()

    def _is_softmax_router(self, j: int) -> bool:
        """Whether a softmax of outputs weighs experts: one by one, or along an axis of them."""
        product, how = self._products[j], self._outputs[j]
        own = {(product.leaf, atom.axis, atom.size) for atom in product.kept}
        others = (axis for each in self._facts["contracted"] if own & {*each} for axis in each)
        weighs = "experts" in how or any(
            leaf != product.leaf
            and self._kept(leaf) - {axis}
            and self._contracts_besides(leaf, axis)
            for leaf, axis, _ in others
        )
        return "softmax" in how and weighs

    def _kept(self, leaf: int) -> set[int | None]:
        """The axes of a parameter that products keep."""
        return {atom.axis for j in self._products_of[leaf] for atom in self._products[j].kept}

    def _low_rank_pairs(self) -> Iterator[frozenset[int]]:
        """Parameters of which one takes the outputs of the other alone, as in LoRA beside a kernel.

        Only linear operations are between, so that both are factors of a matrix of lower rank, at
        most half of what it could be.
        """
        for j, leaf, is_linear in self._facts["followed"]:
            is_only = j >= 0 and len(self._followers[j]) == 1
            if is_linear and is_only and leaf != (product := self._products[j]).leaf:
                kept = [size_of(self._products[k].kept) for k in self._products_of[leaf]]
                if kept and 2 * size_of(product.kept) <= min(size_of(product.contracted), *kept):
                    yield frozenset((product.leaf, leaf))

    def _latents_and_factors(self) -> tuple[set[int], set[int]]:
        """Parameters that are multiplied with parameters.

        Where one of two is also used entry by entry with data, it is a table of latents.
        """
        pairs = {*map(frozenset, self._facts["factors"]), *self._low_rank_pairs()}
        with_data = {i for i, uses in self._uses.items() if "with data" in uses}
        latents = set().union(*(pair & with_data for pair in pairs if not pair <= with_data))
        return latents, set().union(*(pair for pair in pairs if not pair & latents))

    def _axes_of_experts(self) -> set[tuple[int, int]]:
        """The axes of experts: those that weights batch, or that meet what a router chooses."""
        products = [self._products[j] for j in self._seen]
        gates = {
            (p.leaf, a.axis, a.size) for p in products if p.leaf in self._routers for a in p.kept
        }
        met = {axis for each in self._facts["batched"] if len(each) > 1 for axis in each}
        for each in self._facts["contracted"]:
            chosen = {n for *_, n in gates.intersection(each)}
            met |= {
                (leaf, axis, n)
                for leaf, axis, n in each
                if n in chosen and leaf not in self._routers and self._contracts_besides(leaf, axis)
            }
        found = {(leaf, axis) for leaf, axis, n in met if n == self._shapes[leaf][axis]}
        # An axis of experts leaves one that is kept.
        return {(i, axis) for i, axis in found if self._kept(i) - {a for j, a in found if j == i}}

    def _contracts_besides(self, leaf: int, axis: int) -> bool:
        """Whether products contract another axis of a parameter than this one."""
        products = (self._products[j] for j in self._products_of[leaf])
        return any(atom.axis != axis for product in products for atom in product.contracted)

    def route(self, i: int, per_head: bool) -> Route:
        """Returns the route of parameter i."""
        ways, view = self._ways(i), None
        role, reason = self._role(i, ways)
        if role in MUON:
            try:
                view, reason = self._view(i, ways, per_head)
                reason += "; the inputs come first" if role == "input" else ""
            except ValueError as error:
                role, reason = "unclear", str(error)
        return Route(self._paths[i], self._shapes[i], role, view, reason)

    def _role(self, i: int, ways: Sequence[Way]) -> tuple[str, str]:
        """The role of a parameter, and why it has it."""
        uses, own = self._uses[i], self._products_of[i]
        is_vector = len([n for n in self._shapes[i] if n > 1]) < 2
        opaque = sorted(use for use in uses if use.startswith("opaque "))
        if opaque and not is_vector:
            names = [use.removeprefix("opaque ") for use in opaque]
            return "unclear", f"{_in_words(names)} takes it, and does not show what for"
        if "modulated" in uses:
            return "unclear", "data change it, entry by entry, before a product takes it"
        if "times a constant" in uses:
            return "unclear", "a constant multiplies it, and data multiply what comes out"
        if any("frozen" in self._outputs[j] for j in own & self._last):
            return "unclear", (
                "its outputs meet a constant matrix of the function: if that is a frozen parameter,"
                " pass by_use all parameters"
            )
        if "makes weights" in uses:
            return "unclear", "what its product makes is used as weights"
        if len({min(way, _swapped(way), key=str) for way in ways}) > 1:
            return "unclear", f"one product {_said(ways[0])}, another {_said(ways[1])}"
        is_unseen = i in self._in_backward_alone
        if is_unseen and not is_vector or own & self._last & self._maybe_last:
            return "unclear", (
                "fn differentiates outputs that it does not use: pass by_use the forward pass that"
                " is differentiated"
            )
        others = [j for j in own if not self._products[j].is_own] or own
        firsts = {is_first for j in others for is_first, _ in self._seen[j]} - {None}
        found = {
            "embedding": "lookup" in uses
            and "matrices chosen by data" not in uses
            or "lookup by constants" in uses
            and not ways,
            "latents": i in self._latents or "latents" in uses and not (ways or is_vector),
            "factor": i in self._factors,
            "depthwise": not ways and "depthwise" in uses,
            "unused": not (ways or uses or is_unseen),
            "output": bool(own & self._last),
            "vector": not ways or is_vector,
            "router": i in self._routers,
        }
        if role := next((role for role, is_so in found.items() if is_so), ""):
            is_thin = role == "vector" and ways
            return role, "it has one input or one output" if is_thin else REASONS[role]
        if network := self._network_after(i):
            return "unclear", (
                f"its outputs, joined with the inputs, feed {network}: if it is an output head,"
                " pass by_use the forward pass of each network by itself"
            )
        return "input" if firsts == {True} else "hidden", ""

    def _network_after(self, i: int) -> str | None:
        """The one other module at the top that outputs go into, joined with the inputs.

        An actor's last layer feeds one where a loss has the critic judge its action.
        """
        own = self._products_of[i]
        tops = [path.partition("/")[0] for path in self._paths]
        with_products = [top for j, top in enumerate(tops) if self._products_of[j]]
        after = {tops[leaf] for j in own for leaf in self._followers[j]}
        is_beside = any("beside inputs" in self._outputs[j] for j in own)
        if not is_beside or len(after) != 1 or tops[i] in after:
            return None
        are_networks = all(with_products.count(top) > 1 for top in (tops[i], *after))
        return after.pop() if are_networks else None

    def _ways(self, i: int) -> list[Way]:
        """How products use a parameter, the one of the largest operand first."""
        entries: dict[Way, int] = {}
        for j in sorted(self._products_of[i]):
            way = self._way(i, self._products[j])
            entries[way] = max(entries.get(way, 0), *(most for _, most in self._seen[j]))
        return sorted(entries, key=lambda way: -entries[way])

    def _way(self, i: int, product: Product) -> Way:
        """The digits of each axis in a product, with their sides."""
        sides = {"C": product.contracted, "F": product.kept, "B": product.batch}
        found = []
        for axis, n in enumerate(self._shapes[i]):
            own: dict[tuple[int, int], Any] = {
                (atom.stride, atom.size): side
                for side, atoms in sides.items()
                for atom in atoms
                if atom.axis == axis and (atom.size > 1 or atom.stride)
            }
            of_axis: set[Any] = {"B"} if (i, axis) in self._experts else {*own.values()} or {"B"}
            if len(of_axis) == 1:
                found.append((Digit(n, of_axis.pop()),))
            else:
                ordered = sorted(own.items(), reverse=True)
                found.append(tuple(Digit(size, side) for (_, size), side in ordered))
        return tuple(found)

    def _view(self, i: int, ways: Sequence[Way], per_head: bool) -> tuple[View, str]:
        """The view of a parameter, and why.

        Raises:
            ValueError: its parts do not repeat.
        """
        way = ways[0]

        def is_kept(axis: int) -> bool:
            return [digit.side for digit in way[axis]] == ["F"]

        facts, shape = self._facts, self._shapes[i]
        labels: dict[int, list[int]] = {}
        for axis in filter(is_kept, range(len(shape))):
            key = (i, axis)
            of_axis = (self._taken[key], self._gated[key], shape[axis], key in facts["hidden"])
            if found := labels_of_parts(*of_axis):
                labels[axis] = found
        heads: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        for axis, begin, *head in self._heads[i]:
            if is_kept(axis):
                heads[axis][begin] = min((*head,), heads[axis].get(begin, (*head,)))
        kept = [axis for axis, digits in enumerate(way) if any(d.side == "F" for d in digits)]
        if all({*heads.get(axis, {}).values()} == {(1, shape[axis])} for axis in kept):
            heads.clear()  # of one column each, such as the step sizes of a delta rule
        reason = _said(way)
        for axis, of_axis in sorted(labels.items()):
            cuts = [k for k in range(1, shape[axis]) if of_axis[k] != of_axis[k - 1]]
            shown = [*map(str, cuts[:5]), "…"] if len(cuts) > 6 else [*map(str, cuts)]
            reason += f", cut at {_in_words(shown)}" + f" of axis {axis}" * (len(labels) > 1)
        if heads:
            reason += f", heads on {_axes_named(sorted(heads))}"
        if len(ways) > 1:
            reason += ", and the other way round elsewhere"
        return view_of_use(shape, way, labels, heads if per_head else {}), reason


def _by_first(pairs: Iterable[tuple[Any, Any]]) -> defaultdict[Any, set[Any]]:
    """For each first of a pair the seconds."""
    found: defaultdict[Any, set[Any]] = defaultdict(set)
    for first, second in pairs:
        found[first].add(second)
    return found


def _swapped(way: Way) -> Way:
    """The same way with contracted and kept axes in each other's places."""
    other: dict[Any, Any] = {"C": "F", "F": "C", "B": "B"}
    return tuple(tuple(Digit(n, other[side]) for n, side in axis) for axis in way)


def _said(way: Way) -> str:
    """The sides of each axis in words."""
    verbs = {"C": "contracts", "F": "keeps", "B": "has a matrix for each index of"}
    said = []
    for side, verb in verbs.items():
        axes = [axis for axis, digits in enumerate(way) if any(d.side == side for d in digits)]
        if axes:
            said.append(f"{verb} {_axes_named(axes)}")
    return ", ".join(said)


def _axes_named(axes: Sequence[int]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {_in_words(map(str, axes))}"


def _in_words(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
