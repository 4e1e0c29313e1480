"""`scale_by_muon`: momentum, orthogonalized matrix by matrix, in groups of one shape."""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_jax._checks import checks_arguments
from muon_jax._distributed.exchange import Exchange, exchange_of
from muon_jax._distributed.map_matrices import map_matrices, map_momenta
from muon_jax._distributed.sharding import (
    InitShardings,
    Parameter,
    Shardings,
    inner_products,
    is_in_shard_map,
    parameters_of,
    warn_of_other_shardings,
)
from muon_jax._iteration.coefficients import NSCoeffs, canonicalize
from muon_jax._iteration.newton_schulz import Iterations, NewtonSchulz
from muon_jax._iteration.normalization import EpsMode, Preconditioning
from muon_jax._matrices.views import Views, check_views
from muon_jax._transforms.chain import skip_missing
from muon_jax._transforms.momentum import (
    Accumulation,
    Momentum,
    MuonState,
    Rounding,
    Storage,
    random_keys,
    storage_of,
)
from muon_jax._trees import (
    check_each_decides,
    check_floats,
    check_gradients,
    check_mu_dtype,
    check_params,
    check_state,
    errors_naming,
    first_match,
    has_masked,
    path_name,
)
from pallas_kernels.device import current, standard_promotion

# Coefficients for each regular expression of paths, or a function of a path and a shape.
type _OfOnePath = NSCoeffs | NewtonSchulz
type CoeffsByPath = Mapping[str, _OfOnePath] | Callable[[str, tuple[int, ...]], _OfOnePath]


@checks_arguments
def scale_by_muon(
    ns_coeffs: NSCoeffs | NewtonSchulz | CoeffsByPath = "standard",
    ns_steps: int | jax.Array = 5,
    beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    mu_dtype: jax.typing.DTypeLike | Storage | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    weight_dimension_numbers: Views = None,
    momentum: Momentum = "bias_corrected",
    eps_mode: EpsMode = "add",
    shardings: Shardings | Exchange = None,
    mu_rounding: Rounding | None = None,
) -> optax.GradientTransformation:
    """Replaces each gradient by the orthogonalized momentum of its parameter.

    With gradient g at step t = 1, 2, …, for each matrix

        m <- βm + (1 - β)g,
        u = β·m/(1 - βᵗ⁺¹) + (1 - β)·g/(1 - βᵗ) with Nesterov momentum, else m/(1 - βᵗ),

    and the update is the polar factor of u, approximated as by `newton_schulz(u)`: close to the
    nearest orthogonal matrix. A parameter whose gradient is None is skipped: its update is zero,
    and its momentum stays as it is. What follows in a chain takes the zeros for an update. `muon`
    skips the parameter in all that it does.

    Args:
        ns_coeffs: coefficients of the Newton–Schulz steps: a triple, a table of triples, or the
            name of a published set or of a composed schedule (`"fast"`, `"balanced"`,
            `"accurate"`), see `newton_schulz`; or a `NewtonSchulz`, which also says how products
            run. Or one of these by path:

            - a dict of coefficients for each regular expression. Expressions are searched for in
              paths such as `"layers/0/mlp/up/kernel"`. The first that matches decides.
            - a callable `(path, shape) -> coefficients` of whole parameters.
              `optax.inject_hyperparams` takes callables for schedules: give it
              `static_args="ns_coeffs"`.

            A stack of layers is one parameter, and has one set. Matrices with other coefficients
            are in other groups, and share exchanges.
        ns_steps: number of Newton–Schulz steps, see `newton_schulz`. A traced number below 1 counts
            as 1.
        beta: decay rate β of the momentum.
        eps: added to the norm that u is divided by.
        mu_dtype: dtype of the momentum; None for the dtype of the parameters. A momentum of
            `"heavy_ball"` grows to 1/(1 - β) times the gradients. In float16 it overflows where
            gradients exceed 65504·(1 - β), 3275 for β = 0.95. Later updates are then NaN: pass
            `"bfloat16"` there, or another form of `momentum`. `"int8"` keeps momenta of 4096 or
            more entries as `contrib.Quantized`, in 8 bits with scales for rows and columns, and
            others in float32. Updates compute in float32. `contrib.on_host(dtype)` keeps large
            momenta in the memory of the host.
        nesterov: whether to use Nesterov momentum.
        adaptive: whether to multiply the update o of a parameter by its dual norm ⟨u, o⟩
            (`Bernstein and Newhouse <https://arxiv.org/abs/2409.20325>`_). The dual norm of a stack
            is the sum over its matrices, as in optax.
        preconditioning: `"frobenius"`, `"spectral"`, `"aol"` or `"schatten"`, see `newton_schulz`.
        weight_dimension_numbers: the matrices of each parameter: a tree of
            `optax.contrib.MuonDimensionNumbers`, `Split` or `Unfold`, which may be a prefix of the
            parameters' tree, or a callable that makes such a tree from the parameters.
            `MuonDimensionNumbers` says which axes are rows (the reduction axes) and which are
            columns. All other axes are batch axes, whose matrices are orthogonalized each by
            itself. A class of another package with the same two fields is taken, too, such as
            MaxText's. None stands for matrices: parameters of rank 2. Parameters that `by_role`
            leaves to AdamW must not get here; `muon` sees to that.
        momentum: the form of the momentum.

            - `"bias_corrected"`: the above.
            - `"ema"`: the same without bias correction, Keller Jordan's, u = βm + (1 - β)g or m.
            - `"heavy_ball"`: sums, m <- βm + g and u = βm + g or m.
        eps_mode: `"add"`, or `"max"` to divide u by the larger of its norm and `eps`.
        shardings: `jax.sharding.PartitionSpec` or `NamedSharding` of each parameter: a tree that
            may be a prefix of the parameters' tree, or a callable that makes one from the
            parameters, such as `get_partition_spec` of Flax. Pass None to have the shardings found
            out, which works everywhere but in a `shard_map`. On automatic axes of TPUs they are
            those that `init` saw outside `jit`; a warning says where it saw none. One device, the
            owner, receives all shards of a matrix, orthogonalizes it and sends the results back. A
            few wide matrices may stay sharded instead, where a model of the times finds that
            faster. Pass an `Exchange` to decide otherwise.
        mu_rounding: `"nearest"`, or `"stochastic"` for a momentum of bfloat16 or int8 that is
            computed in float32 and rounded up or down at random, so that small gradients are not
            lost in it; int8 does so only where an entry changes by less than half the distance
            between two codes. None is `"stochastic"` for int8, where small entries would otherwise
            never decay, and `"nearest"` for others.

    Raises:
        TypeError: an argument that is a number or a boolean got another type, such as a schedule.
        ValueError: an argument is none of the values above; `beta` is not in [0, 1); `eps` is
            negative; no pattern of `ns_coeffs` matches a parameter, or one matches none in a tree
            without `optax.MaskedNode`; a dtype is that of integers other than int8; `mu_dtype` is a
            float of 8 bits, or is complex where a parameter is real, or conversely; under int8,
            explicit mesh axes cut a block, or the state has a large momentum in another dtype; the
            state is in another memory than `init` puts it in; a parameter is no matrix of floats;
            gradients do not fit the parameters; `shardings` is missing or wrong, names an axis that
            the mesh lacks, or asks for what the matrices cannot be; or `adaptive` comes with
            `"gram"`, `"block"` or a `block_period`.
        NotImplementedError: the named implementation, or the kind of memory, cannot be used here;
            or blocks are under a derivative on automatic mesh axes.
    """
    direction, storage = orthogonalization(locals(), InitShardings()), storage_of(mu_dtype)
    update = skip_missing(direction.update, "mu", storage, has_momenta=True)
    return optax.GradientTransformationExtraArgs(direction.init, standard_promotion()(update))


def orthogonalization(
    arguments: Mapping[str, Any], init_shardings: InitShardings
) -> optax.GradientTransformationExtraArgs:
    """Returns `scale_by_muon` with all these arguments, for gradients of which none is None.

    An update may get `of_muon`, the parameters of its leaves. Else it finds them, with views of the
    tree `whole`, in which no parameter is masked.
    """
    given = types.SimpleNamespace(**arguments)
    views, beta, eps = given.weight_dimension_numbers, given.beta, given.eps
    check_views(views)
    exchange = exchange_of(given.shardings)
    shardings, has_block_steps = exchange.shardings, exchange.has_block_steps
    iterations_of = iterations_by_path(
        given.ns_coeffs,
        steps=given.ns_steps,
        eps=eps,
        eps_mode=given.eps_mode,
        preconditioning=given.preconditioning,
    )
    if given.adaptive:
        exchange.check_sums("adaptive=True")
    storage = storage_of(given.mu_dtype)
    rounding = given.mu_rounding or storage.rounding

    def update_momentum(
        accumulate: Accumulation, m: Any, g: jax.Array, key: jax.Array | None = None
    ) -> tuple[Any, Any]:
        u, new = accumulate(g, storage.load(m))
        return u, storage.save(new, m, key)

    def init_fn(params: optax.Params) -> MuonState:
        check_params(params)
        check_floats(params)
        check_mu_dtype(params, storage.dtype)
        if not is_in_shard_map():  # where arrays are shards
            parameters_of(views, params, shardings)  # raises where views
            iterations_of(params)  # or coefficients do not fit
        warn_of_other_shardings(params, shardings)
        init_shardings.keep(params)
        mu = storage.init(params, views, shardings)
        return storage.memory.place(MuonState(jnp.zeros([], jnp.int32), mu))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        whole: optax.Updates | None = None,
        of_muon: Sequence[Parameter] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MuonState]:
        del extra_args
        check_state(updates, state, params, "mu")
        before, state = state.mu, state._replace(mu=storage.unpack(state.mu))
        shapes = storage.map(storage.shape_of, state.mu)
        check_gradients(updates, shapes, "the state")
        storage.memory.check(state)
        storage.check(state.mu, updates, shardings, rounding)
        count = jnp.asarray(optax.safe_increment(state.count))
        accumulate = Accumulation.of_step(
            given.momentum, beta, count, nesterov=given.nesterov, rounding=rounding
        )

        update_leaf = jax.tree_util.Partial(update_momentum, accumulate)
        if of_muon is None:
            of_muon = parameters_of(views, updates, shardings, whole)
        shapes_of_whole = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in of_muon)
        iterations = iterations_of(jax.tree.structure(updates).unflatten(shapes_of_whole))
        made, is_nearest = None, rounding == "nearest"
        if current().platform == "gpu" and storage.is_plain and is_nearest and not given.adaptive:
            weights = accumulate.weights
            made = map_momenta(
                iterations, of_muon, state.mu, updates, weights, update_leaf, shardings
            )
        if made:
            u, (orthogonal, mu) = updates, made
        else:
            keys: list[Any] = [None] * len(of_muon)
            if rounding == "stochastic":
                keys = random_keys(of_muon, count)
            u, mu = storage.update_leaves(update_leaf, state.mu, updates, keys, are_read_again=True)
            every = u if whole is None or whole is updates else whole
            init_shardings.keep(every)
            filled = init_shardings.fill(every, shardings)
            known = exchange if filled is shardings else exchange.with_(shardings=filled)
            step = exchange.step(state.count) if has_block_steps else None
            orthogonal = map_matrices(iterations, of_muon, u, known, step)
        if given.adaptive:
            dual_norms = inner_products(u, orthogonal, of_muon)
            orthogonal = jax.tree.map(jnp.multiply, dual_norms, orthogonal)

        def cast(o: jax.Array, g: jax.Array, m: jax.ShapeDtypeStruct) -> jax.Array:
            return o.astype(jnp.result_type(g.dtype, m.dtype, beta, eps))  # as in optax

        orthogonal = jax.tree.map(cast, orthogonal, updates, shapes)
        return orthogonal, MuonState(count, storage.pack(mu, before))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def iterations_by_path(
    ns_coeffs: NSCoeffs | NewtonSchulz | CoeffsByPath, **arguments: Any
) -> Callable[[Any], Iterations]:
    """Returns a function from a tree of whole arrays, or shapes of them, to its iterations.

    Args:
        ns_coeffs: as for `scale_by_muon`.
        **arguments: `steps`, `eps` and others that stand for attributes that are None.

    Raises:
        TypeError: coefficients are themselves a dict or a callable.
        ValueError: coefficients are wrong, or beside the other arguments. The function also raises
            where a dict has no pattern for a leaf, and as `check_patterns`.
    """

    def iteration_of(coeffs: Any) -> NewtonSchulz:
        if not isinstance(coeffs, NewtonSchulz):
            coeffs = NewtonSchulz(canonicalize("ns_coeffs", coeffs))
        return coeffs.filled(**arguments)

    patterns: dict[str, NewtonSchulz] = {}
    if not callable(ns_coeffs):
        given = ns_coeffs if isinstance(ns_coeffs, Mapping) else {"": ns_coeffs}
        patterns = {pattern: iteration_of(coeffs) for pattern, coeffs in given.items()}

    def of_leaf(name: str, shape: tuple[int, ...]) -> NewtonSchulz:
        if callable(ns_coeffs):
            return iteration_of(ns_coeffs(name, shape))
        pattern = first_match(patterns, name)
        if pattern is None:
            raise ValueError(
                "no pattern of ns_coeffs matches its path: add '.*': 'standard' as the last entry,"
                " for all paths that no other pattern matches"
            )
        return patterns[pattern]

    def of_tree(tree: Any) -> Iterations:
        check_patterns(ns_coeffs, jax.tree.map(lambda _: "muon", tree))
        found: dict[Any, NewtonSchulz] = {}
        keys = []
        for path, x in jax.tree.leaves_with_path(tree):
            name, shape = path_name(path), np.shape(x)
            with errors_naming(name, shape):
                iteration = of_leaf(name, shape)
            keys.append(iteration.key)
            found.setdefault(keys[-1], iteration)
        order = {key: i for i, key in enumerate(found)}
        shown = tuple(_named(iteration.coeffs) for iteration in found.values())
        return Iterations((*found.values(),), shown, tuple(order[key] for key in keys))

    return of_tree


def check_patterns(ns_coeffs: NSCoeffs | NewtonSchulz | CoeffsByPath, labels: Any) -> None:
    """Raises ValueError where a pattern decides no path of Muon's, although no leaf is masked.

    Args:
        ns_coeffs: as for `scale_by_muon`.
        labels: for each parameter the name of its optimizer.
    """
    named = jax.tree.leaves_with_path(labels)
    names = [path_name(path) for path, label in named if label == "muon"]
    if isinstance(ns_coeffs, Mapping) and names and not has_masked(labels):
        check_each_decides("ns_coeffs", ns_coeffs, names, "parameters that Muon has")


def _named(coeffs: Any) -> str:
    """What reports call canonical coefficients."""
    if isinstance(coeffs, str):
        return coeffs
    if isinstance(coeffs, jax.Array):
        return "traced"
    if isinstance(coeffs[0], tuple):
        return f"{len(coeffs)} triples"
    return "({:g}, {:g}, {:g})".format(*coeffs)
