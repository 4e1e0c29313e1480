"""`NewtonSchulz`: a Newton–Schulz iteration, resolved once, that runs stacks of matrices.

Each step is a Gram matrix, products of m × m matrices, and one application.

    R = XXᵀ,   Q = h(R),   X <- QX.

Each step but the first forms R from the rounded X, so rounding does not add up between steps.
Within a step of several products it does: rounding R hides small singular values, which h amplifies
by its slope at 0. Steep steps therefore keep the residuals of R and of the first products
(`Step.residual_betas`), and have noise, which keeps rounding errors from adding up (`Step.noisy`).

In the gram form (`form`), several quintic steps share a Gram matrix and an application.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax._checks import check_fields
from muon_jax._iteration.coefficients import NSCoeffs, canonicalize, resolve_schedule
from muon_jax._iteration.form import (
    Form,
    Method,
    ProductsDType,
    Wanted,
    form_of_group,
    form_of_stack,
    gram_form,
    matmul_precision,
    segments,
)
from muon_jax._iteration.grouping import map_by_shape
from muon_jax._iteration.normalization import (
    EpsMode,
    Normalization,
    Preconditioning,
    gram_gain,
    largest_entries,
)
from muon_jax._iteration.operand import (
    Accumulated,
    WholeMatrices,
    WholeStacks,
    accumulate,
    cut_at,
    cut_padding,
    in_rows,
    is_tall,
    join,
    pad_for_kernels,
    scale_down,
    split,
    transposed,
    transposed_back,
)
from muon_jax._iteration.steps import DEFAULT_STEPS, Schedule, Step, is_traced, noise_addend
from pallas_kernels import Implementation
from pallas_kernels import device as _device

# Of `newton_schulz`, and of optimizers.
_DEFAULTS = {"steps": DEFAULT_STEPS, "eps_mode": "add", "preconditioning": "frobenius"}


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, repr=False)
class NewtonSchulz:
    """A Newton–Schulz iteration: its coefficients, and how its products run.

    Pass it in the place of coefficients, alone or by path:

        muon(0.02, ns_coeffs=NewtonSchulz("balanced", dtype="bfloat16"))
        newton_schulz(stack, NewtonSchulz("balanced"))

    As a pytree its leaves are what a trace may not know: `eps`, traced coefficients or steps, and
    the arrays of a `Partial`. Everything else is static.

    Attributes:
        coeffs: a triple (a, b, c), a table of triples, or a name; see `newton_schulz`.
        steps, eps, eps_mode, preconditioning: as for `newton_schulz`. None stands for the argument
            of the same name (`ns_steps` for `steps`) of the function that gets the iteration.
        dtype: of the products; `"auto"` for what the coefficients need, None for the dtype of the
            momentum, see `newton_schulz`.
        method: `"standard"` or `"gram"`, see `newton_schulz`; None for the faster form. In an
            optimizer it is the one that is faster on a stack of 16, however many matrices there
            are.
        implementation: of the products, one of `pallas_kernels.IMPLEMENTATIONS` or None for the
            fastest; see `newton_schulz`.
        max_group_bytes: an optimizer orthogonalizes matrices of one shape, or of the transposed
            shape, together, in groups of at most this many bytes of momentum. None is 1 GiB, or
            less for 256 MiB of Gram matrices. 0 takes each parameter by itself. A parameter is
            never cut: a larger stack of layers or experts is a group of its own. At once, a device
            sends at most the smaller of this and 256 MiB, or a single matrix if that is larger.
        before: a function of the matrices, `x -> y`, or None. The iteration runs on y instead of x.
            AdaMuon's is `jnp.sign`.
        after: a function of the polar factors and the matrices, `(o, x) -> result`, or None. x is
            what `before` got.

            Both get stacks `(..., m, n)` with m ≤ n, in which tall matrices are transposed, and
            return arrays of that shape and dtype. Which matrices a stack holds depends on groups
            and on shardings, so the functions must treat each matrix alike. Arrays that a function
            needs belong in a `jax.tree_util.Partial`, which passes them on as operands. Matrices
            with these functions do not stay sharded, nor are they cut in blocks: their owners
            receive them whole, in the dtype of the momentum.

    Raises:
        TypeError: an attribute has another type; or `before` or `after` does not hash or closes
            over a traced array.
        ValueError: an attribute is none of the values above or out of range, or two contradict each
            other. An update raises where `before` or `after` returns another shape or dtype, or
            would get blocks.
    """

    coeffs: NSCoeffs = "standard"
    steps: int | jax.Array | None = None
    eps: float | jax.Array | None = None
    eps_mode: EpsMode | None = None
    preconditioning: Preconditioning | None = None
    dtype: ProductsDType = "auto"
    method: Method | None = None
    implementation: str | None = None
    max_group_bytes: int | None = None
    before: Callable[[jax.Array], jax.Array] | None = None
    after: Callable[[jax.Array, jax.Array], jax.Array] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "coeffs", canonicalize("coeffs", self.coeffs))
        for name in ("before", "after"):
            if isinstance(function := getattr(self, name), jax.tree_util.Partial):
                object.__setattr__(self, name, jax.tree.map(_as_operand, function))
        if self.steps is not None and not is_traced(self.steps):
            object.__setattr__(self, "steps", int(self.steps))
        if self.schedule.is_composed and self.dtype not in ("auto", None):
            self.schedule.steps_in(self.dtype)  # raises where the schedule is unsafe

    def filled(self, **arguments: Any) -> Self:
        """Returns the iteration with these values for the attributes that are None.

        Args:
            **arguments: of the function that got the iteration, by the names of its attributes.

        Raises:
            ValueError: an argument that is not at its default contradicts the attribute. `eps` may
                differ, because AdamW has it as well.
        """
        for name, value in arguments.items():
            own, default = getattr(self, name), _DEFAULTS.get(name, value)
            if own is not None and not is_traced((own, value)) and value not in (default, own):
                argument = "ns_steps" if name == "steps" else name
                raise ValueError(
                    f"ns_coeffs={self} has {name}={own!r}, got {argument}={value!r} beside it: pass"
                    " one of them"
                )
        return dataclasses.replace(
            self, **{name: x for name, x in arguments.items() if getattr(self, name) is None}
        )

    def __repr__(self) -> str:
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        given = [(field.name, x) for field, x in fields[1:] if x is not field.default]
        functions = {"before", "after"}  # by name: their own repr has an address
        others = [
            f"{name}={getattr(x, '__name__', repr(x)) if name in functions else repr(x)}"
            for name, x in given
        ]
        return f"NewtonSchulz({', '.join([repr(self.coeffs), *others])})"

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The steps."""
        steps = DEFAULT_STEPS if self.steps is None else self.steps
        return resolve_schedule(self.coeffs, steps, self.preconditioning or "frobenius")

    @property
    def has_functions(self) -> bool:
        """Whether there are `before` or `after`."""
        return self.before is not None or self.after is not None

    def programs_of_functions(self, shape: tuple[int, int], dtype: np.dtype) -> str:
        """Returns what `before` and `after` compute of a matrix, for keys of compiled programs.

        It is lowered text, because that has the constants of inner functions too.
        """

        def like(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))

        x, found = jax.ShapeDtypeStruct((1, *shape), dtype), []
        for function, operands in ((self.before, (x,)), (self.after, (x, x))):
            if function is not None:
                is_partial = isinstance(function, jax.tree_util.Partial)
                called = function if is_partial else jax.tree_util.Partial(function)
                lowered = jax.jit(lambda f, *xs: f(*xs)).lower(
                    jax.tree.map(like, called), *operands
                )
                found.append(lowered.as_text())
        return repr(found)

    @property
    def key(self) -> Any:
        """What two iterations have in common that are one: what hashes, else the arrays' ids."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(id(x) if isinstance(x, jax.Array) else x for x in fields)

    @functools.cached_property
    def _wanted(self) -> Wanted:
        """What the caller says of the form."""
        schedule, preconditioning = self.schedule.without_arrays(), self.preconditioning
        preconditioning = preconditioning or "frobenius"
        return Wanted(schedule, self.method, preconditioning, self.dtype, self.implementation)

    def form(self, shape: tuple[int, int], in_dtype: jax.typing.DTypeLike) -> Form:
        """Returns the form of an optimizer's matrices `(m, n)` of `in_dtype`, m ≤ n."""
        return form_of_group(self._wanted, shape, jnp.dtype(in_dtype))

    def form_of_stack(self, shape: tuple[int, ...], in_dtype: jax.typing.DTypeLike) -> Form:
        """Returns the form of one stack `(..., m, n)` of `in_dtype`, m ≤ n."""
        return form_of_stack(self._wanted, shape, jnp.dtype(in_dtype))

    def sharded_form(self, in_dtype: jax.typing.DTypeLike) -> Form | str:
        """Returns the form of sharded matrices, or why there is none."""
        if self.has_functions:
            return "NewtonSchulz(before=, after=) take whole matrices"
        return gram_form(self._wanted, jnp.dtype(in_dtype))

    def map(self, stacks: Sequence[Any]) -> list[Any]:
        """Returns the polar factors of an optimizer's matrices, group by group.

        Args:
            stacks: shapes `(batch, m, n)`, for any m and n. Those without elements stay as they
                are. For an `Accumulated` the result is a pair: the polar factors, as its arrays
                lie in memory, and the new momenta.
        """
        full = [x for x in stacks if x.size]
        results = iter(
            map_by_shape(
                lambda group: orthogonalize(self, group),
                full,
                self.max_group_bytes,
                self.shares_launches,
            )
        )
        return [next(results) if x.size else x for x in stacks]

    def accumulates(self, stack: Accumulated) -> bool:
        """Returns whether a kernel computes that stack where it is read."""
        m, n = sorted(stack.shape[1:])
        if not jnp.issubdtype(stack.dtype, jnp.floating) or not stack.size or self.has_functions:
            return False
        form = self.form((m, n), stack.dtype)
        chosen = form.chosen((m, n))
        return chosen.accumulates(stack.gradients, stack.momenta, form.dtype)

    def shares_launches(self, stack: jax.Array | Accumulated) -> bool:
        """Returns whether matrices of one m and several n run in the same launches."""
        m, n = sorted(stack.shape[-2:])
        form = self.form((m, n), stack.dtype)
        is_shared = self.schedule.is_composed or form.method == "gram"
        is_kernel = form.implementation and form.chosen((m, n)).names == ("mosaic_gpu",)
        return is_shared and bool(is_kernel) and self.preconditioning != "aol"

    def run(self, stacks: Sequence[Any], form: Form, operand: WholeMatrices) -> list[Any]:
        """Returns what `map` does of all stacks, in that form.

        Args:
            stacks: shapes `(batch, m, n)` or `(batch, n, m)`, of one dtype; arrays, or all of them
                `Accumulated`. Those of one shape become one stack in the dtype of the products.
            form: of their matrices.
            operand: the matrices, whole.
        """
        if not self.has_functions:
            return self._run(stacks, form, operand)
        wide = [transposed(x) if is_tall(x) else x for x in stacks]
        before, after = self.before, self.after
        given = [_called("before", before, x) for x in wide] if before else wide
        results = self._run(given, form, operand)
        if after:
            results = [_called("after", after, o, x) for o, x in zip(results, wide, strict=True)]
        pairs = zip(results, stacks, strict=True)
        return [transposed_back(o) if is_tall(x) else o for o, x in pairs]

    def _run(self, stacks: Sequence[Any], form: Form, operand: WholeMatrices) -> list[Any]:
        """`run` without `before` and `after`."""
        parts = [[*part] for _, part in itertools.groupby(stacks, lambda x: max(x.shape[-2:]))]
        ns = [max(part[0].shape[-2:]) for part in parts]
        joined, scales, momenta = [], [], []
        for part, n in zip(parts, ns, strict=True):
            if isinstance(part[0], Accumulated):
                new, x, scale = accumulate(part, n, form.dtype, operand)
                momenta += new
            else:
                scaled, scale = scale_down(part, largest_entries(part), n, form.dtype, operand)
                x = join(scaled)
            joined.append(x)
            scales.append(scale)
        if len(parts) == 1:
            results = [self.iterate(joined[0], form, scales[0], gram_gain(ns[0]), operand)]
        else:
            gains = [jnp.full_like(x, gram_gain(n)) for x, n in zip(scales, ns, strict=True)]
            scale, gain = map(jnp.concatenate, (scales, gains))
            results = self.iterate(joined, form, scale, gain, operand)
        if momenta:
            made = (_as_given(*pair, operand) for pair in zip(results, parts, strict=True))
            return [*zip(itertools.chain(*made), momenta, strict=True)]
        return [
            (transposed_back(x) if is_tall(given) else x).astype(given.dtype)
            for result, part in zip(results, parts, strict=True)
            for x, given in zip(split(result, part), part, strict=True)
        ]

    def iterate(
        self, x: Any, form: Form, scale: jax.Array, gain: float | jax.Array, operand: WholeMatrices
    ) -> Any:
        """Returns the result of the steps.

        Args:
            x: wide matrices `(..., m, n)` that `scale_down` has made, or pieces of such; or several
                stacks, as `operand` takes them.
            form: of the matrices.
            scale: of each matrix that `operand` gives the Gram matrix of, from `scale_down`.
            gain: the `gram_gain`, or one for each matrix.
            operand: the matrices whole or, in the Gram form, sharded.
        """
        schedule, given = self.schedule, x
        norm = "schatten_4" if schedule.is_composed else self.preconditioning or "frobenius"
        eps = 0.0 if self.eps is None else self.eps
        normalization = Normalization(norm, eps, self.eps_mode or "add", scale, gain)
        # XLA cannot run a product merged with a transpose on CPUs.
        if _device.current().platform == "cpu":
            x = jax.lax.optimization_barrier(x)
        x = jax.tree.map(lambda x: pad_for_kernels(x, operand), x)
        full = schedule.is_composed or schedule.diverging == "16 bits"
        with matmul_precision(form.dtype, full=full):
            in_gram_form = form.method == "gram" and not schedule.is_composed
            run = run_gram_form if in_gram_form else run_steps
            x = run(x, schedule, normalization, operand)
        return jax.tree.map(
            lambda x, like: cut_padding(x, like.shape[-2], like.shape[-1], operand), x, given
        )

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        """Returns the leaves, and all else."""
        named = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        kinds = jax.Array, jax.tree_util.Partial
        pairs = [(name == "eps" or isinstance(x, kinds), x) for name, x in named]
        static = tuple((leaf, not leaf and x) for leaf, x in pairs)
        schedule = self.__dict__.get("schedule")  # resolved once, where it is known
        known = None if schedule is None or schedule.traced else schedule
        return [x for leaf, x in pairs if leaf], (static, known)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Sequence[Any]) -> Self:
        """The inverse of `tree_flatten`."""
        made, left = object.__new__(cls), iter(leaves)  # any objects, which no check takes
        fields, schedule = static
        for field, (is_leaf, x) in zip(dataclasses.fields(cls), fields, strict=True):
            object.__setattr__(made, field.name, next(left) if is_leaf else x)
        if schedule is not None:
            made.__dict__["schedule"] = schedule
        return made


def _as_operand(leaf: Any) -> Any:
    """An array of numpy as an array of JAX, which traces know for an operand."""
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def _called(name: str, function: Callable[..., Any], *given: jax.Array) -> jax.Array:
    """Returns what `before` or `after` makes of matrices; raises ValueError unless it is like x."""

    def of(y: Any) -> str:
        return f"{y.dtype}{[*y.shape]}" if hasattr(y, "dtype") else type(y).__name__

    needed = of(given[-1])
    try:
        made = function(*given)
    except Exception as error:
        error.add_note(f"This is in NewtonSchulz({name}=), which got {len(given)} × {needed}.")
        raise
    if of(made) != needed:
        raise ValueError(
            f"NewtonSchulz({name}=) must return matrices of the shape and dtype that it got,"
            f" {needed}, got {of(made)}: cast or transpose them back in the function"
        )
    return made


# Jitted, so that groups of equal shapes are traced and lowered once.
@jax.jit
def orthogonalize(iteration: NewtonSchulz, stacks: list[Any]) -> list[Any]:
    """Returns what `NewtonSchulz.map` does of matrices that share launches."""
    (m, n), *others = {tuple(sorted(x.shape[-2:])) for x in stacks}
    form = iteration.form((m, n), stacks[0].dtype)
    operand = WholeStacks if others else WholeMatrices
    return iteration.run(stacks, form, operand(implementation=form.chosen((m, n))))


def _as_given(
    result: jax.Array, stacks: Sequence[Accumulated], operand: WholeMatrices
) -> list[jax.Array]:
    """Returns the parts of a result that belong to the stacks, as their arrays lie in memory.

    Neighbours are transposed together, in 16 bits. Where XLA transposes in the pass that adds to a
    parameter, it does not write that parameter in place.
    """
    runs = [[*run] for _, run in itertools.groupby(stacks, lambda x: x.is_transposed)]
    sizes = tuple(sum(map(len, run)) for run in runs)
    m, n = sorted(stacks[0].shape[1:])
    found = []
    for x, run in zip(cut_at(result, sizes) if len(runs) > 1 else [result], runs, strict=True):
        x = cut_padding(x, m, n, operand)
        x = in_rows(x.mT) if run[0].is_transposed else x
        own = split(x, [given.gradients for given in run])
        found += [part.astype(given.dtype) for part, given in zip(own, run, strict=True)]
    return found


@dataclasses.dataclass(frozen=True)
class Iterations:
    """The iterations of a tree's matrices.

    Attributes:
        distinct: one for each set of coefficients.
        names: what reports call each set.
        of_leaves: for each leaf of the tree, the index of its iteration.
    """

    distinct: tuple[NewtonSchulz, ...]
    names: tuple[str, ...]
    of_leaves: tuple[int, ...]

    def of_some(self, leaves: Sequence[int]) -> "Iterations":
        """Returns the iterations of a tree that has these leaves alone."""
        return dataclasses.replace(self, of_leaves=tuple(self.of_leaves[i] for i in leaves))


def map_by_iteration(
    iterations: Sequence[NewtonSchulz],
    numbers: Sequence[int],
    stacks: Sequence[Sequence[Any]],
) -> list[Any]:
    """Returns what `NewtonSchulz.map` does of all stacks, one after the other.

    Args:
        iterations: the iterations.
        numbers: for each sequence of stacks, the index of its iteration.
        stacks: as for `NewtonSchulz.map`.
    """
    flat = [(n, x) for n, each in zip(numbers, stacks, strict=True) for x in each]
    results: dict[int, Any] = {}
    for number, iteration in enumerate(iterations):
        own = [i for i, (of_stack, _) in enumerate(flat) if of_stack == number]
        results |= zip(own, iteration.map([flat[i][1] for i in own]), strict=True)
    return [results[i] for i in range(len(flat))]


def run_steps(
    x: Any, schedule: Schedule, normalization: Normalization, operand: WholeMatrices
) -> Any:
    """Returns the result of the steps on X over its norm.

    - The first Gram matrix is that of gain·X, for the norm to be read off it. Its entries are at
      most 2¹⁵, and its small entries are not subnormal in float16.
    - Entries of X are at most n^-¼. So entries of h/ν, at most 318/ν for every composed schedule
      and its Schatten-4 norm ν, are within float16 for every shape and spectrum.

    Args:
        x: shape `(..., m, n)`, or several stacks, as `operand` takes them.
        schedule: the steps. A number of steps that the trace does not know becomes a loop.
        normalization: of X.
        operand: the matrices whole, or sharded.
    """
    dtype = jax.tree.leaves(x)[0].dtype
    steps, loop = schedule.steps_in(dtype), schedule.loop
    options = {"symmetrize_output": False}
    syrk_chain = operand.implementation.syrk_chain
    has_16_bits = jnp.finfo(dtype).bits == 16

    def run(step: Step, x: Any, *, last: bool) -> Any:
        residual = has_16_bits and bool(step.residual_betas)
        grams = operand.gram(x, residual=residual, **options)
        return operand.apply(syrk_chain(*step.chain(*grams), **options), x, last=last)

    step = steps[0]
    if loop is not None:
        step = dataclasses.replace(schedule.step_at(loop[0], dtype), noisy=step.noisy)
    residual = has_16_bits and bool(step.residual_betas)
    gram, *others = operand.gram(x, normalization.gain**2, residual=residual, **options)
    x, gram, s, factor = normalization(x, gram, operand.spread)
    q = syrk_chain(*step.scaled(s, factor).chain(gram, *others), **options)
    x = operand.apply(q, x, last=loop is None and len(steps) == 1)
    if loop is not None:
        first, end = loop
        return jax.lax.fori_loop(
            first + 1, end, lambda i, x: run(schedule.step_at(i, dtype), x, last=False), x
        )
    for i, step in enumerate(steps[1:], 2):
        x = run(step, x, last=i == len(steps))
    return x


def run_gram_form(
    x: Any, schedule: Schedule, normalization: Normalization, operand: WholeMatrices
) -> Any:
    """Returns the result of the steps on X over its norm.

    Args:
        x: shape `(..., m, n)`, or several stacks, as `operand` takes them.
        schedule: quintic steps, none of them traced.
        normalization: of X.
        operand: the matrices whole, or sharded.
    """
    (gram,) = operand.gram(x, normalization.gain**2)
    x, gram, s, factor = normalization(x, gram, operand.spread)
    parts = segments(schedule, gram.dtype)
    for index, steps in enumerate(parts):
        if index:
            (gram,), s, factor = operand.gram(x), 1.0, 1.0
        q = _segment(operand.implementation, gram, steps, s, factor)
        x = operand.apply(q, x, last=index == len(parts) - 1)
    return x


def _segment(
    implementation: Implementation,
    gram: jax.Array,
    steps: tuple[Step, ...],
    s: float | jax.Array,
    factor: float | jax.Array,
) -> jax.Array:
    """factor times the product of the steps' factors, from R = s²·gram on; shape `(..., m, m)`.

    All products are of one kind, for one program: R² is R·Rᵀ by `syrkx`, with R for an addend.
    """

    def syrkx(a: jax.Array, b: jax.Array, *cs: jax.Array, beta: Any, **others: Any) -> jax.Array:
        betas = beta if isinstance(beta, tuple) else (beta,)
        (out,) = implementation.syrkx(a, b, cs, betas=betas, **others)
        return out

    r, scale, factors = gram, s**2, []
    *others, (a, b, c) = (step.triple for step in steps)
    for a_i, b_i, c_i in others:
        z = syrkx(r, r, r, alpha=c_i * scale**2, beta=b_i * scale)
        t = syrkx(r, z, r, alpha=scale, beta=a_i * scale)
        r, scale = syrkx(t, z, t, beta=a_i), 1.0
        factors.append((z, a_i))
    cs, betas = (r,), (factor * b * scale,)
    if steps[-1].noisy:
        amplitude, noise = noise_addend(r)
        cs, betas = (r, noise), (*betas, amplitude * factor * a)
    q = syrkx(r, r, *cs, alpha=factor * c * scale**2, beta=betas, diagonal=factor * a)
    for z, a_i in reversed(factors):
        q = syrkx(z, q, q, beta=a_i)
    return q
