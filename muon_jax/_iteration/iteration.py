"""`Iteration`: a Newton–Schulz iteration, resolved once, that runs stacks of matrices."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from muon_jax._iteration.composed import run_composed
from muon_jax._iteration.form import (
    GROUP,
    Form,
    Method,
    ProductsDType,
    fastest_form,
    implementation_of_group,
    offered_form,
)
from muon_jax._iteration.gram import run_gram_form
from muon_jax._iteration.grouping import map_by_shape
from muon_jax._iteration.normalization import (
    EpsMode,
    Normalization,
    Preconditioning,
    gram_gain,
    largest_entries,
)
from muon_jax._iteration.operand import WholeMatrices, WholeStacks
from muon_jax._iteration.passes import (
    cut_padding,
    is_tall,
    join,
    pad_for_kernels,
    scale_down,
    split,
    transposed_back,
)
from muon_jax._iteration.precision import Backend, backend_in_force, matmul_precision
from muon_jax._iteration.quintic import run_quintics
from muon_jax._iteration.recipes import NSCoeffs, Recipe, resolve_recipe
from muon_jax._iteration.steps import Schedule
from pallas_kernels import device as _device


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Iteration:
    """A Newton–Schulz iteration.

    As a pytree its leaves are what a trace may not know: `eps`, and traced coefficients or steps.
    Everything else is static.

    Attributes:
        recipe: the steps.
        eps, eps_mode, preconditioning, dtype: as for `newton_schulz`.
        method: `"standard"`, `"gram"`, or None for the faster form.
        implementation: of all products; None for the fastest.
    """

    recipe: Recipe
    eps: float | jax.Array
    eps_mode: EpsMode = "add"
    preconditioning: Preconditioning = "frobenius"
    dtype: ProductsDType = "auto"
    method: Method | None = None
    implementation: str | None = None

    @classmethod
    def resolve(
        cls,
        ns_coeffs: NSCoeffs | jax.Array,
        ns_steps: int | jax.Array,
        eps: float | jax.Array,
        *,
        preconditioning: Preconditioning,
        **attributes: Any,
    ) -> Self:
        """Returns the iteration with the steps that `ns_coeffs` and `ns_steps` stand for.

        Raises:
            ValueError: as `resolve_recipe`.
        """
        recipe = resolve_recipe(ns_coeffs, ns_steps, preconditioning)
        return cls(recipe, eps, preconditioning=preconditioning, **attributes)

    def form(self, shape: tuple[int, int], in_dtype: jnp.dtype) -> Form:
        """Returns the form of an optimizer's matrices `(m, n)` of `in_dtype`, m ≤ n.

        It is the form of a stack of 16, so an update never depends on its group.

        Raises:
            ValueError: as `fastest_form`.
        """
        form = self.form_of_stack((GROUP, *shape), in_dtype)
        is_composed = isinstance(self.recipe, Schedule)
        of_group = implementation_of_group(shape, form.dtype, is_composed=is_composed)
        return form._replace(implementation=form.implementation or of_group)

    def form_of_stack(self, shape: tuple[int, ...], in_dtype: jnp.dtype) -> Form:
        """Returns the form of one stack `(..., m, n)` of `in_dtype`, m ≤ n.

        Raises:
            ValueError: as `fastest_form`.
        """
        return _form_of_stack(self._static, shape, jnp.dtype(in_dtype), backend_in_force())

    def form_in_pieces(self, in_dtype: jnp.dtype) -> Form | str:
        """Returns the gram form, which matrices in pieces run in, or why there is none."""
        if self.method == "standard":
            return "the standard form was asked for, where every step multiplies with X"
        return _gram_form(self._static, jnp.dtype(in_dtype), backend_in_force())

    def map(self, stacks: Sequence[jax.Array], max_group_bytes: int | None) -> list[jax.Array]:
        """Returns the polar factors of an optimizer's matrices, group by group.

        Args:
            stacks: shapes `(batch, m, n)`, for any m and n. Those without elements stay as they
                are.
            max_group_bytes: as for `map_by_shape`.
        """
        full = [x for x in stacks if x.size]
        results = iter(
            map_by_shape(
                lambda group: orthogonalize(self, group),
                full,
                max_group_bytes,
                self.shares_launches,
            )
        )
        return [next(results) if x.size else x for x in stacks]

    def shares_launches(self, stack: jax.Array) -> bool:
        """Returns whether matrices of one m and several n run in the same launches."""
        m, n = sorted(stack.shape[-2:])
        form = self.form((m, n), stack.dtype)
        is_shared = isinstance(self.recipe, Schedule) or form.method == "gram"
        return is_shared and form.implementation == "mosaic_gpu" and self.preconditioning != "aol"

    def run(
        self, stacks: Sequence[jax.Array], form: Form, operand: WholeMatrices
    ) -> list[jax.Array]:
        """Returns the polar factors of all stacks, in that form.

        Args:
            stacks: shapes `(batch, m, n)` or `(batch, n, m)`, of one dtype. Equal matrices become
                one stack in the dtype of the products.
            form: of their matrices.
            operand: the matrices, whole.
        """
        parts = [[*part] for _, part in itertools.groupby(stacks, lambda x: max(x.shape[-2:]))]
        ns = [max(part[0].shape[-2:]) for part in parts]
        joined, scales = [], []
        for part, n in zip(parts, ns, strict=True):
            scaled, scale = scale_down(part, largest_entries(part), n, form.dtype, operand)
            joined.append(join(scaled))
            scales.append(scale)
        if len(parts) == 1:
            results = [self.iterate(joined[0], form, scales[0], gram_gain(ns[0]), operand)]
        else:
            gains = [jnp.full_like(x, gram_gain(n)) for x, n in zip(scales, ns, strict=True)]
            scale, gain = map(jnp.concatenate, (scales, gains))
            results = self.iterate(joined, form, scale, gain, operand)
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
            operand: the matrices whole or, in the gram form, in pieces.
        """
        recipe, given = self.recipe, x
        normalization = Normalization(self.preconditioning, self.eps, self.eps_mode, scale, gain)
        if _device.platform() == "cpu":  # where XLA cannot run a product merged with a transpose
            x = jax.lax.optimization_barrier(x)
        x = jax.tree.map(lambda x: pad_for_kernels(x, operand), x)
        full = isinstance(recipe, Schedule) or recipe.diverging == "16 bits"
        with matmul_precision(form.dtype, full=full):
            if isinstance(recipe, Schedule):
                x = run_composed(x, recipe.steps_in(form.dtype), normalization, operand)
            elif form.method == "gram":
                x = run_gram_form(x, recipe, normalization, operand)
            else:
                x = run_quintics(x, recipe, normalization, operand)
        return jax.tree.map(
            lambda x, like: cut_padding(x, like.shape[-2], like.shape[-1], operand), x, given
        )

    @property
    def _static(self) -> "Iteration":
        """What is known while tracing, which hashes."""
        recipe = self.recipe
        if not isinstance(recipe, Schedule):
            recipe = recipe.without_arrays()
        return dataclasses.replace(self, recipe=recipe, eps=0.0)

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        """Returns the leaves, and all else."""
        is_known = isinstance(self.recipe, Schedule) or not self.recipe.traced
        leaves, treedef = jax.tree.flatten(self.recipe, is_leaf=lambda _: is_known)
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        known = tuple([None if isinstance(leaf, jax.Array) else leaf for leaf in leaves])
        others = (self.eps_mode, self.preconditioning, self.dtype, self.method, self.implementation)
        return [self.eps, *arrays], (treedef, known, others)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Sequence[Any]) -> Self:
        """The inverse of `tree_flatten`."""
        treedef, known, others = static
        eps, *rest = leaves
        arrays = iter(rest)
        merged = [next(arrays) if leaf is None else leaf for leaf in known]
        return cls(treedef.unflatten(merged), eps, *others)


# Jitted, so that groups of equal shapes are traced and lowered once.
@jax.jit
def orthogonalize(iteration: Iteration, stacks: list[jax.Array]) -> list[jax.Array]:
    """Returns the polar factors of matrices that share launches, in the order of their stacks."""
    (m, n), *others = {tuple(sorted(x.shape[-2:])) for x in stacks}
    form = iteration.form((m, n), stacks[0].dtype)
    operand = WholeStacks if others else WholeMatrices
    return iteration.run(stacks, form, operand(implementation=form.implementation))


@functools.lru_cache(maxsize=1024)
def _form_of_stack(
    iteration: Iteration, shape: tuple[int, ...], in_dtype: jnp.dtype, backend: Backend
) -> Form:
    del backend  # what the choice asks of the surroundings: a part of the key
    form = fastest_form(
        iteration.recipe,
        iteration.method,
        iteration.preconditioning,
        iteration.dtype,
        shape,
        in_dtype,
    )
    return form._replace(implementation=iteration.implementation)


@functools.lru_cache(maxsize=1024)
def _gram_form(iteration: Iteration, in_dtype: jnp.dtype, backend: Backend) -> Form | str:
    del backend
    form = offered_form(
        iteration.recipe, "gram", iteration.preconditioning, iteration.dtype, in_dtype
    )
    if isinstance(form, Form):
        form = form._replace(implementation=iteration.implementation)
    return form
