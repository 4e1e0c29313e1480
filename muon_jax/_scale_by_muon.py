"""`scale_by_muon`: momentum, orthogonalized matrix by matrix, in groups of one shape."""

import functools

import jax
import jax.numpy as jnp
import optax

from muon_jax._checks import check, check_float, check_number
from muon_jax._distributed.map_matrices import map_matrices
from muon_jax._distributed.on_shards import inner_products
from muon_jax._distributed.sharding import Shardings
from muon_jax._iteration.normalization import EpsMode
from muon_jax._iteration.recipes import NSCoeffs, canonicalize, is_traced, resolve_recipe
from muon_jax._iteration.steps import Schedule
from muon_jax._matrices.views import Views
from muon_jax._newton_schulz import STATIC, Method, Preconditioning, ProductsDType, orthogonalize
from muon_jax._transforms.momentum import Momentum, MuonState, accumulate
from muon_jax._transforms.rounding import Rounding, cast_like, widen
from muon_jax._trees import fill_missing

# Jitted, so that groups of equal shapes are traced and lowered once.
_ORTHOGONALIZE = jax.jit(orthogonalize, static_argnames=STATIC)


def scale_by_muon(
    ns_coeffs: NSCoeffs = "standard",
    ns_steps: int | jax.Array = 5,
    beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    weight_dimension_numbers: Views = None,
    momentum: Momentum = "bias_corrected",
    eps_mode: EpsMode = "add",
    ns_dtype: ProductsDType = "auto",
    ns_method: Method | None = None,
    implementation: str | None = None,
    max_group_bytes: int | None = None,
    shardings: Shardings = None,
    mu_rounding: Rounding = "nearest",
    distributed_gram: bool | None = None,
) -> optax.GradientTransformation:
    """Replaces each gradient by the orthogonalized momentum of its parameter.

    With gradient g at step t = 1, 2, …, for each matrix

        m <- βm + (1 - β)g,
        u = β·m/(1 - βᵗ⁺¹) + (1 - β)·g/(1 - βᵗ) with Nesterov momentum, else m/(1 - βᵗ),

    and the update is `newton_schulz(u)`, close to the nearest orthogonal matrix. A gradient that is
    None counts as zeros: its momentum decays, and is orthogonalized.

    Args:
        ns_coeffs: coefficients of the Newton–Schulz steps: a triple, a table of triples or a name,
            of a published set or of a composed schedule (`"fast"`, `"balanced"`, `"accurate"`), see
            `newton_schulz`.
        ns_steps: number of Newton–Schulz steps, see `newton_schulz`; a traced one below 1 counts
            as 1.
        beta: decay rate β of the momentum.
        eps: added to the norm that u is divided by.
        mu_dtype: dtype of the momentum; None for that of the parameters.
        nesterov: whether to use Nesterov momentum.
        adaptive: whether to multiply the update o of a parameter by its dual norm ⟨u, o⟩
            (`Bernstein and Newhouse <https://arxiv.org/abs/2409.20325>`_), of a stack the sum over
            its matrices, as in optax.
        preconditioning: `"frobenius"`, `"spectral"`, `"aol"` or `"schatten"`, see `newton_schulz`.
        weight_dimension_numbers: `optax.contrib.MuonDimensionNumbers` for each parameter, as a tree
            that may be a prefix of the parameters', or a callable that makes one from them: which
            axes are rows (the reduction axes) and which are columns; all others are batch axes, and
            matrices along them are orthogonalized each by itself. None for matrices: rank 2. So
            what `by_role` leaves to AdamW must not get here: `muon` sees to that.
        momentum: `"bias_corrected"` is the above; `"ema"` the same without bias correction, Keller
            Jordan's, u = βm + (1 - β)g or m; `"heavy_ball"` sums, m <- βm + g and u = βm + g or m.
        eps_mode: `"add"`, or `"max"` to divide u by the larger of its norm and `eps`.
        ns_dtype: dtype of the iteration's products; `"auto"` for what the coefficients need, None
            for the momentum's, see `newton_schulz`.
        ns_method: `"standard"` or `"gram"`, see `newton_schulz`; None for the faster one on a stack
            of 16, however many matrices are grouped.
        implementation: of the products, `"xla"`, `"triton"`, `"mosaic_gpu"` or None for the
            fastest; see `newton_schulz`.
        max_group_bytes: matrices of one shape, or its transpose, are orthogonalized together, in
            groups of at most so many bytes of momentum, and exchanged in such as well. None is
            1 GiB, or less for 256 MiB of Gram matrices. 0 takes each parameter by itself. One
            parameter is never cut: a larger stack of layers or experts goes alone.
        shardings: `jax.sharding.PartitionSpec` or `NamedSharding` of each parameter, as a tree that
            may be a prefix of the parameters', or a callable that makes one from them, such as
            `get_partition_spec` of Flax. None finds out, except in a `shard_map`. Sharded matrices
            are exchanged, orthogonalized whole by one device each, and exchanged back, or stay
            where they are (`distributed_gram`).
        mu_rounding: `"nearest"`, or `"stochastic"` for a momentum of bfloat16 that is computed in
            float32 and rounded up or down at random, so that small gradients are not lost in it.
        distributed_gram: whether sharded matrices stay in pieces, X = (X₁ X₂ …), and devices sum
            XXᵀ = Σᵢ XᵢXᵢᵀ in place of exchanging X; in the gram form of `newton_schulz`, with
            results that differ from those on one device by the rounding of that sum. None where
            there are fewer equal matrices than devices along the mesh axes that they are sharded
            over, no replicas that such a sum could let drift apart, and a model of the times finds
            it faster; True for all but those of `Split` and `Unfold`; False for none.

    Raises:
        TypeError: `beta` or `eps` is a schedule.
        ValueError: an argument is none of the values above, `beta` is not in [0, 1), `eps` or
            `max_group_bytes` is negative, a dtype is that of integers, `mu_dtype` has 8 bits, a
            parameter is no matrix, `ns_dtype` is one that the composed schedule is unsafe in, or
            `shardings` is missing or wrong. Or `distributed_gram` is True, matrices are sharded,
            and none of them can stay in pieces.
        NotImplementedError: the named implementation cannot run here.
    """
    check("preconditioning", preconditioning, Preconditioning)
    check("momentum", momentum, Momentum)
    check("eps_mode", eps_mode, EpsMode)
    check("mu_rounding", mu_rounding, Rounding)
    check_number("beta", beta, below=1)
    check_number("eps", eps)
    for name, value in (("ns_dtype", ns_dtype), ("max_group_bytes", max_group_bytes)):
        if isinstance(value, jax.Array):
            raise ValueError(
                f"{name} must be no array, got {value}: optax.inject_hyperparams makes one of it;"
                f" give it static_args={name!r}"
            )
    check_float("mu_dtype", mu_dtype)
    if mu_dtype is not None and jnp.finfo(mu_dtype).bits < 16:
        raise ValueError(f"mu_dtype must have 16 bits or more, got {jnp.dtype(mu_dtype)}")
    check_float("ns_dtype", ns_dtype)
    if max_group_bytes is not None and max_group_bytes < 0:
        raise ValueError(f"max_group_bytes must be None or at least 0, got {max_group_bytes}")
    ns_coeffs = canonicalize(ns_coeffs)
    recipe = resolve_recipe(ns_coeffs, ns_steps, preconditioning)
    if isinstance(recipe, Schedule) and ns_dtype not in ("auto", None):
        recipe.steps_in(ns_dtype)  # raises where that is unsafe
    if is_traced((ns_coeffs, ns_steps)):  # under optax.inject_hyperparams
        function = orthogonalize
    else:
        function, ns_steps = _ORTHOGONALIZE, int(ns_steps)

    def init_fn(params):
        return MuonState(
            count=jnp.zeros([], jnp.int32), mu=optax.tree.zeros_like(params, dtype=mu_dtype)
        )

    def update_fn(updates, state, params=None):
        updates = fill_missing(updates, state.mu if params is None else params)
        count = jnp.asarray(optax.safe_increment(state.count))
        wide, old_mu = widen(updates, state.mu, mu_rounding)
        u, mu = accumulate(momentum, wide, old_mu, beta, count, nesterov)
        of_group = functools.partial(
            function,
            ns_coeffs=ns_coeffs,
            ns_steps=ns_steps,
            eps=eps,
            eps_mode=eps_mode,
            dtype=ns_dtype,
            method=ns_method,
            preconditioning=preconditioning,
            implementation=implementation,
        )
        orthogonal = map_matrices(
            of_group, weight_dimension_numbers, u, shardings, max_group_bytes, distributed_gram
        )
        if adaptive:
            dual_norms = inner_products(u, orthogonal, shardings)
            orthogonal = jax.tree.map(jnp.multiply, dual_norms, orthogonal)
        orthogonal = jax.tree.map(lambda o, g: o.astype(g.dtype), orthogonal, updates)
        mu = cast_like(mu, state.mu, mu_rounding, count, shardings)
        return orthogonal, MuonState(count, mu)

    return optax.GradientTransformation(init_fn, update_fn)
