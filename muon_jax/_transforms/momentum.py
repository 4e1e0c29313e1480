"""The momentum: how it accumulates, how it is rounded, and how a state keeps it."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from muon_jax._distributed.sharding import (
    Parameter,
    Shardings,
    axes_of_spec,
    is_in_shard_map,
)
from muon_jax._matrices.views import Views

type Rounding = Literal["nearest", "stochastic"]


def cast_like(x: jax.Array, like: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns `x`, rounded to the dtype of `like`.

    Args:
        x: float32 where it is rounded at random.
        like: an array.
        key: of random bits, to round to bfloat16 up or down at random; None to round to nearest.
    """
    if key is not None and like.dtype == jnp.bfloat16:
        return stochastic_round(x, key)
    return x.astype(like.dtype)


def random_keys(parameters: Sequence[Parameter], count: jax.Array) -> list[jax.Array]:
    """Returns a key for each parameter, by step `count`, place, and in a `shard_map` the shard."""
    key = jax.random.fold_in(jax.random.key(0), count)
    keys = []
    for i, parameter in enumerate(parameters):
        own = jax.random.fold_in(key, i)
        names = () if parameter.spec is None else axes_of_spec(parameter.spec)
        if names and jax.lax.axis_size(names) > 1:
            own = jax.random.fold_in(own, jax.lax.axis_index(names))
        keys.append(own)
    return keys


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 `x` in bfloat16, rounded up or down at random so that the mean is `x`.

    A bfloat16 is the upper half of a float32. Random bits are added to the lower half, and the sum
    is cut to its upper half. The probability of a carry into the upper half is the distance from
    the neighbour below. Values of bfloat16, infinities and NaN stay what they are.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    upper = (bits >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


type Momentum = Literal["bias_corrected", "ema", "heavy_ball"]


class MuonState(NamedTuple):
    """State of `scale_by_muon`.

    Attributes:
        count: the number of updates so far (int32).
        mu: the momentum of each parameter: an array, or what `mu_dtype` puts in its place.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] (optax's name)
    mu: optax.Updates


class Accumulation(NamedTuple):
    """What becomes of a gradient g and its momentum m: the new m, and u, to be orthogonalized.

    Attributes:
        to_m: the weights of m and g in the new m.
        to_u: the weights of the new m and g in u; None where u is the new m.
        correction: what u is divided by where `to_u` is None. None without bias correction.
        rounding: of the new m.
    """

    to_m: tuple[Any, Any]
    to_u: tuple[Any, Any] | None
    correction: jax.Array | None
    rounding: Rounding

    @classmethod
    def of_step(
        cls,
        momentum: Momentum,
        beta: float | jax.Array,
        count: jax.Array,
        *,
        nesterov: bool,
        rounding: Rounding,
    ) -> Self:
        """Returns the accumulation of a step; what depends on the step is computed once.

        Args:
            momentum: the form, see `scale_by_muon`.
            beta: β.
            count: the number t = 1, 2, … of this step.
            nesterov: whether u looks one step ahead.
            rounding: of the new m.
        """
        to_m = (beta, 1.0 if momentum == "heavy_ball" else 1 - beta)
        if momentum != "bias_corrected":
            return cls(to_m, to_m if nesterov else None, None, rounding)
        correction = 1 - beta**count
        of_m = beta / (1 - beta ** jnp.asarray(optax.safe_increment(count)))
        of_g = (1 - beta) / correction  # at most 1: it cannot overflow
        return cls(to_m, (of_m, of_g) if nesterov else None, correction, rounding)

    @property
    def weights(self) -> jax.Array:
        """The weights w of m <- w₀m + w₁g and u = w₂m + w₃g, shape `(4,)`, in float32."""
        over = 1.0 if self.correction is None else 1 / self.correction
        weights = (*self.to_m, *(self.to_u or (over, 0.0)))
        return jnp.stack([jnp.asarray(x, jnp.float32) for x in weights])

    def __call__(self, g: jax.Array, m: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns u and the new m, in the dtype that both are computed in.

        It is the wider of their dtypes, or float32 before stochastic rounding.
        """
        is_nearest = self.rounding == "nearest"
        dtype = jnp.promote_types(g.dtype, m.dtype) if is_nearest else jnp.float32
        g, m = g.astype(dtype), m.astype(dtype)
        m = self.to_m[0] * m + self.to_m[1] * g
        if self.correction is None:
            return (self.to_u[0] * m + self.to_u[1] * g if self.to_u else m), m
        if not self.to_u:
            return m / self.correction.astype(m.dtype), m
        return self.to_u[0].astype(m.dtype) * m + self.to_u[1].astype(g.dtype) * g, m


# Values of `mu_dtype` that a module serves, which is imported when one asks for them.
_SERVED = {"int8": ("muon_jax.contrib._quantized", "Int8")}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where a state is: on the device, where updates compute."""

    def is_on_host(self, x: Any) -> bool:
        """Returns whether an array like `x` belongs on the host."""
        return False

    def place(self, state: Any) -> Any:
        """Returns a new state with its arrays where they belong."""
        return state

    def fetch(self, tree: Any) -> Any:
        """Returns the tree on the device."""
        return tree

    def streamed[**P](
        self, update: Callable[P, tuple[Any, Any]], gradients: Sequence[Any], are_read_again: bool
    ) -> Callable[P, tuple[Any, Any]]:
        """Returns `update`, from a leaf and its gradient to a result and a new leaf, for each leaf.

        Args:
            update: computes on the device.
            gradients: all of them.
            are_read_again: whether results are read more than once.
        """
        return update

    def check(self, state: Any) -> None:
        """Raises ValueError where an array of the state is not where it belongs."""
        if is_in_shard_map():  # where sizes are those of shards
            return
        for path, x in jax.tree.leaves_with_path(state):
            is_on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
            if is_on_host != self.is_on_host(x):
                raise ValueError(
                    "mu_dtype says that the large arrays of the state are"
                    f" {'on the device' if is_on_host else 'on the host'}, got"
                    f" {jax.tree_util.keystr(path)} of type {jax.typeof(x)}: pass"
                    " jax.tree.map(lambda x, like: jax.device_put(x, jax.typeof(like)"
                    ".memory_space), state, optimizer.init(params)), and the shardings of this"
                    " state to jit(out_shardings=...)"
                )


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a state keeps the momenta `mu`. Here each is an array.

    Attributes:
        dtype: as `mu_dtype` says it.
        memory: where they are.
        rounding: what `mu_rounding=None` stands for.
    """

    dtype: jax.typing.DTypeLike | None = None
    memory: Memory = Memory()
    rounding: ClassVar[Rounding] = "nearest"

    @property
    def is_plain(self) -> bool:
        """Whether momenta are arrays on the device."""
        return type(self) is Storage and type(self.memory) is Memory

    @property
    def computed_dtype(self) -> jax.typing.DTypeLike | None:
        """The dtype in which updates compute; None for that of the parameters."""
        return self.dtype

    @property
    def of_adam(self) -> "Storage":
        """How AdamW's moments are kept."""
        return self

    def init(self, params: Any, views: Views, shardings: Shardings) -> Any:
        """Returns momenta of zeros."""
        return optax.tree.zeros_like(params, dtype=self.dtype)

    def load(self, m: Any) -> jax.Array:
        """Returns the array that a momentum stands for."""
        return self.memory.fetch(m)

    def save(self, x: jax.Array, like: Any, key: jax.Array | None) -> Any:
        """Returns a new momentum `x` as `like` is kept, rounded at random where there is a key."""
        return cast_like(x, like, key)

    def in_order(self, update: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        """Returns `update` of a leaf, computed in the order that needs the least memory."""
        return update

    def unpack(self, mu: Any) -> Any:
        """Returns momenta as `init` made them, whatever wrapped or restored them since."""
        return mu

    def pack(self, mu: Any, given: Any) -> Any:
        """Returns momenta in the form that `given` had before `unpack`."""
        return mu

    def check(self, mu: Any, gradients: Any, shardings: Shardings, rounding: Rounding) -> None:
        """Raises ValueError where momenta are not as `init` makes them, or cannot be rounded so."""
        if rounding != "stochastic":
            return
        for name, tree in (("gradient", gradients), ("momentum", mu)):
            for path, x in jax.tree.leaves_with_path(tree):
                of = f"the {name} of the parameter {jax.tree_util.keystr(path)} is {x.dtype}"
                if jnp.issubdtype(x.dtype, jnp.complexfloating):
                    raise ValueError(
                        f"mu_rounding='stochastic' rounds real numbers, but {of}: set"
                        " mu_rounding='nearest'"
                    )
                if name == "momentum" and x.dtype != jnp.bfloat16:
                    raise ValueError(
                        f"mu_rounding='stochastic' rounds to bfloat16 or int8, but {of}: set"
                        " mu_dtype='bfloat16'"
                    )

    def is_momentum(self, node: Any) -> bool:
        """Returns whether a node is a momentum that is no array."""
        return False

    def shape_of(self, m: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape and the dtype of the array that a momentum stands for."""
        return jax.ShapeDtypeStruct(m.shape, m.dtype)

    def map(self, function: Callable[[Any], Any], mu: Any) -> Any:
        """Returns the tree of what `function` makes of each momentum."""
        return jax.tree.map(function, mu, is_leaf=self.is_momentum)

    def update_leaves(
        self,
        update: Callable[..., tuple[Any, Any]],
        stored: Any,
        gradients: Any,
        *others: Any,
        are_read_again: bool,
    ) -> tuple[Any, Any]:
        """Returns the trees of results and of new leaves that `update` makes, leaf by leaf.

        Args:
            update: maps a leaf, its gradient and `others` of it to its result and the new leaf.
            stored: a tree of leaves, which are arrays or trees of arrays.
            gradients: a tree with one array in the place of each leaf.
            others: for each gradient, in their order.
            are_read_again: see `Memory.streamed`.
        """
        flat, treedef = jax.tree.flatten(gradients)
        update = self.memory.streamed(self.in_order(update), flat, are_read_again)
        leaves = zip(treedef.flatten_up_to(stored), flat, *others, strict=True)
        pairs = [update(*leaf) for leaf in leaves]
        results, new = zip(*pairs, strict=True) if pairs else ((), ())
        return treedef.unflatten(results), treedef.unflatten(new)


def storage_of(mu_dtype: Any) -> Storage:
    """Returns what `mu_dtype` stands for: a dtype, or a `Storage` itself."""
    if isinstance(mu_dtype, Storage):
        return mu_dtype
    name = None if mu_dtype is None else jnp.dtype(mu_dtype).name
    if name in _SERVED:
        module, served = _SERVED[name]
        return getattr(importlib.import_module(module), served)(mu_dtype)
    return Storage(mu_dtype)
