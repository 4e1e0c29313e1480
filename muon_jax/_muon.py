"""The Muon optimizer: `scale_by_muon` and `muon`, drop-in for those of `optax.contrib`.

Parameters, defaults and formulas are those of optax 0.2.8. Where ours differ:

1.  The iteration computes in the dtype that its coefficients need (`ns_dtype="auto"`): bfloat16, as
    every other Muon does, or float16 for some composed schedules. `ns_dtype=None` is optax's
    choice, the momentum's own dtype.
2.  `ns_coeffs="dion"` with `ns_steps` below 5 runs its last steps and above 5 raises. optax raises
    below and silently runs 5 above.
3.  `ns_coeffs` takes more names than optax's `"standard"` and `"dion"`, and the same ones in
    `scale_by_muon` as in `muon`. optax documents a name `"muon"`, which it rejects.
4.  A gradient of zeros gives an update of zeros in every dtype (optax: NaN in float16), and one of
    magnitude 1e30 the same update as one of magnitude 1 (optax: zero, its norm overflows).
5.  `preconditioning="spectral"` works in bfloat16 and float16 (optax: no SVD in those dtypes).
6.  `eps` applies to `preconditioning="aol"` and `"schatten"` too. optax drops it there.
7.  `"schatten"` takes complex parameters through XXᴴ (optax: XXᵀ).
8.  The state holds what training changes, `count` and `mu`. optax keeps the coefficients in it, so
    that a checkpoint does not load under another set of them.
9.  Updates have the dtype of the gradients and `mu` keeps its own, whatever is promoted between
    (optax: a float32 `mu` makes bfloat16 gradients into float32 updates).
10. Errors name the parameter and say what to do.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_jax import _coefficients, _distributed, _scaling, _sharding, _views
from muon_jax._newton_schulz import (
    Method,
    Preconditioning,
    ProductsDType,
    check_preconditioning,
    newton_schulz,
)
from muon_jax._schedules import Schedule


class MuonState(NamedTuple):
    """State of `scale_by_muon`: the number of updates (int32) and the average of gradients."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] (optax's name)
    mu: optax.Updates


def scale_by_muon(
    ns_coeffs: _coefficients.NSCoeffs = "standard",
    ns_steps: int | jax.Array = 5,
    beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    weight_dimension_numbers: _views.Views = None,
    ns_dtype: ProductsDType = "auto",
    ns_method: Method | None = "standard",
    implementation: str | None = None,
    max_group_bytes: int | None = None,
    shardings: _sharding.Shardings = None,
) -> optax.GradientTransformation:
    """Replaces each gradient by the orthogonalized momentum of its parameter.

    With gradient g at step t = 1, 2, …, for each matrix

        m <- βm + (1 - β)g,
        u = β·m/(1 - βᵗ⁺¹) + (1 - β)·g/(1 - βᵗ) with Nesterov momentum, else m/(1 - βᵗ),

    and the update is `newton_schulz(u)`, close to the nearest orthogonal matrix.

    Args:
        ns_coeffs: coefficients of the Newton–Schulz steps: a triple, a table of triples or a name,
            of a published set or of a composed schedule (`"fast"`, `"balanced"`, `"accurate"`), see
            `newton_schulz`.
        ns_steps: number of Newton–Schulz steps, see `newton_schulz`.
        beta: decay rate β of the momentum.
        eps: added to the norm that u is divided by.
        mu_dtype: dtype of the momentum; None for that of the parameters.
        nesterov: whether to use Nesterov momentum.
        adaptive: whether to multiply the update o of a parameter by its dual norm ⟨u, o⟩
            (`Bernstein and Newhouse <https://arxiv.org/abs/2409.20325>`_).
        preconditioning: `"frobenius"`, `"spectral"`, `"aol"` or `"schatten"`, see `newton_schulz`.
        weight_dimension_numbers: `optax.contrib.MuonDimensionNumbers` for each parameter, as a tree
            that may be a prefix of the parameters', or a callable that makes one from them: which
            axes are rows (the reduction axes) and which are columns; all others are batch axes, and
            matrices along them are orthogonalized each by itself. None for matrices: rank 2.
        ns_dtype: dtype of the iteration's products; `"auto"` for what the coefficients need, None
            for the momentum's, see `newton_schulz`.
        ns_method: `"standard"` or `"gram"`, None for the faster one, see `newton_schulz`.
        implementation: of the symmetric products, `"xla"`, `"triton"`, `"mosaic_gpu"` or None for
            the fastest; see `pallas_kernels.syrk`.
        max_group_bytes: matrices of one shape, or its transpose, are orthogonalized together, in
            groups of at most so many bytes of momentum, None for 1 GiB, and exchanged in such of at
            most 128 MiB. 0 takes each parameter by itself.
        shardings: `jax.sharding.PartitionSpec` or `NamedSharding` of each parameter, as a tree that
            may be a prefix of the parameters', or a callable that makes one from them, such as
            `get_partition_spec` of Flax. None finds out, except in a `shard_map`. Sharded matrices
            are exchanged, orthogonalized whole by one device each, and exchanged back.

    Raises:
        ValueError: an argument is none of the values above, a parameter is no matrix, `ns_dtype`
            is one that the composed schedule is unsafe in, or `shardings` is missing or wrong.
        NotImplementedError: the named implementation cannot run here.
    """
    check_preconditioning(preconditioning)
    if isinstance(ns_dtype, jax.Array):
        raise ValueError(
            "ns_dtype must be a dtype, got an array: optax.inject_hyperparams takes"
            f" {ns_dtype.dtype} for a schedule; give it static_args='ns_dtype'"
        )
    ns_coeffs = _coefficients.canonicalize(ns_coeffs)
    recipe = _coefficients.resolve(ns_coeffs, ns_steps, preconditioning)
    if isinstance(recipe, Schedule) and ns_dtype not in ("auto", None):
        recipe.steps_in(ns_dtype)  # raises where that is unsafe
    if _coefficients.is_traced((ns_coeffs, ns_steps)):  # under optax.inject_hyperparams
        orthogonalize = inspect.unwrap(newton_schulz)
    else:
        orthogonalize, ns_steps = newton_schulz, int(ns_steps)

    def init_fn(params):
        return MuonState(
            count=jnp.zeros([], jnp.int32), mu=optax.tree.zeros_like(params, dtype=mu_dtype)
        )

    def update_fn(updates, state, params=None):
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        if nesterov:
            momentum = jax.tree.map(
                lambda m, g: beta * m + (1 - beta) * g,
                optax.tree.bias_correction(mu, beta, optax.safe_increment(count)),
                optax.tree.bias_correction(updates, beta, count),
            )
        else:
            momentum = optax.tree.bias_correction(mu, beta, count)

        function = functools.partial(
            orthogonalize,
            ns_coeffs=ns_coeffs,
            ns_steps=ns_steps,
            eps=eps,
            dtype=ns_dtype,
            method=ns_method,
            preconditioning=preconditioning,
            implementation=implementation,
        )
        orthogonal = _distributed.map_matrices(
            function, weight_dimension_numbers, momentum, shardings, max_group_bytes
        )
        if adaptive:
            orthogonal = jax.tree.map(lambda o, u: jnp.sum(u.conj() * o) * o, orthogonal, momentum)
        orthogonal = jax.tree.map(lambda o, g: o.astype(g.dtype), orthogonal, updates)
        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu)
        return orthogonal, MuonState(count, mu)

    return optax.GradientTransformation(init_fn, update_fn)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: _coefficients.NSCoeffs = "standard",
    ns_steps: int | jax.Array = 5,
    beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    weight_decay: float | jax.Array = 0.0,
    weight_decay_mask: Any | Callable[[optax.Params], Any] | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: float | jax.Array = 0.9,
    adam_b2: float | jax.Array = 0.999,
    adam_eps_root: float | jax.Array = 0.0,
    adam_weight_decay: float | jax.Array = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: _views.Views = None,
    consistent_rms: float | jax.Array | None = None,
    ns_dtype: ProductsDType = "auto",
    ns_method: Method | None = "standard",
    implementation: str | None = None,
    max_group_bytes: int | None = None,
    shardings: _sharding.Shardings = None,
) -> optax.GradientTransformation:
    """Muon (momentum orthogonalized by Newton–Schulz) on matrices, AdamW on everything else.

    The update of a matrix W with learning rate η and weight decay λ is -η(s·O + λW), where O is the
    output of `scale_by_muon` and s depends on the shape alone (`consistent_rms`).

    Args:
        learning_rate: η, a number or a schedule.
        ns_coeffs: coefficients of the Newton–Schulz steps, see `newton_schulz`: `"balanced"`
            needs fewer products than the default.
        ns_steps: number of Newton–Schulz steps, see `newton_schulz`.
        beta: decay rate of Muon's momentum.
        eps: added to the norm that the momentum is divided by, and to AdamW's denominator.
        weight_decay: λ, multiplied by the learning rate; on matrices.
        weight_decay_mask: tree of booleans (or a callable that makes one): which matrices decay.
        mu_dtype: dtype of the momentum and of AdamW's first moment; None for the parameters'.
        nesterov: whether both sides use Nesterov momentum, so that AdamW is NAdamW, as in optax.
        adaptive: whether to multiply each update by its dual norm, see `scale_by_muon`.
        preconditioning: `"frobenius"`, `"spectral"`, `"aol"` or `"schatten"`, see `newton_schulz`.
        adam_b1: decay rate of AdamW's first moment.
        adam_b2: decay rate of AdamW's second moment.
        adam_eps_root: added under the square root of AdamW's denominator.
        adam_weight_decay: weight decay on everything else.
        adam_learning_rate: AdamW's learning rate; None for `learning_rate`.
        muon_weight_dimension_numbers: which parameters are matrices, and how: a tree of
            `optax.contrib.MuonDimensionNumbers` that may be a prefix of the parameters', None where
            AdamW applies, or a callable that makes one from them. None itself gives Muon all
            parameters of rank 2, embeddings and output heads among them: name those None in a tree.
            A callable gets the parameters in `init` and the gradients in `update`, at times with
            those of AdamW masked out (`optax.MaskedNode`): let it decide leaf by leaf.
        consistent_rms: None for s = √max(1, fan_out/fan_in); a number r for
            s = r·√max(fan_in, fan_out), where r = 0.2 matches the root mean square of AdamW's
            updates, so that one learning rate suits both (`Liu et al.
            <https://arxiv.org/abs/2502.16982>`_).
        ns_dtype: dtype of the iteration's products; `"auto"` for what the coefficients need, None
            for the momentum's, see `newton_schulz`.
        ns_method: `"standard"` or `"gram"`, None for the faster one, see `newton_schulz`.
        implementation: of the symmetric products, see `pallas_kernels.syrk`.
        max_group_bytes: bound of what is orthogonalized together, see `scale_by_muon`.
        shardings: of the parameters, None to find out, see `scale_by_muon`.

    Raises:
        ValueError: an argument is none of the values above, a parameter is no matrix, `ns_dtype`
            is one that the composed schedule is unsafe in, or `shardings` is missing or wrong.
        NotImplementedError: the named implementation cannot run here.

    References:
        Jordan et al., `Muon: an optimizer for hidden layers in neural networks
        <https://kellerjordan.github.io/posts/muon/>`_, 2024.
    """

    def label_params(params):
        numbers = muon_weight_dimension_numbers
        if numbers is None:
            return jax.tree.map(lambda p: "muon" if p.ndim == 2 else "adam", params)
        if callable(numbers):
            numbers = numbers(params)
        return jax.tree.map(
            lambda n, subtree: jax.tree.map(lambda _: "adam" if n is None else "muon", subtree),
            numbers,
            params,
            is_leaf=_views.is_view,
        )

    on_matrices = optax.chain(
        scale_by_muon(
            ns_coeffs,
            ns_steps,
            beta,
            eps,
            mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=muon_weight_dimension_numbers,
            ns_dtype=ns_dtype,
            ns_method=ns_method,
            implementation=implementation,
            max_group_bytes=max_group_bytes,
            shardings=shardings,
        ),
        _scaling.scale_by_shape(muon_weight_dimension_numbers, consistent_rms, shardings),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    on_the_rest = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
    )
    return optax.multi_transform({"muon": on_matrices, "adam": on_the_rest}, label_params)
