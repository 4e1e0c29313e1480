"""The steps at work: each a Gram matrix, products of m × m matrices, and one application.

    R = XXᵀ,   Q = h(R),   X <- QX.

Each step but the first forms R from the rounded X, so rounding does not add up between steps.
Within a step of several products it does: rounding R hides small singular values, which h amplifies
by its slope at 0. Steep steps therefore keep the residuals of R and of the first products
(`Step.residual_betas`), and have noise, which keeps rounding errors from adding up (`Step.noisy`).

In the gram form (`form`), several quintic steps share a Gram matrix and an application.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from muon_jax._iteration.form import segments
from muon_jax._iteration.normalization import Normalization
from muon_jax._iteration.operand import WholeMatrices
from muon_jax._iteration.steps import Schedule, Step, noise_addend
from pallas_kernels import syrkx


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

    def grams(step: Step, x: Any, alpha: float | jax.Array) -> tuple[jax.Array, ...]:
        residual = bool(step.residual_betas) and jnp.finfo(dtype).bits == 16
        return operand.gram(x, alpha, residual=residual, symmetrize_output=False)

    def apply(step: Step, x: Any, *grams: jax.Array, last: bool) -> Any:
        q = step.polynomial(*grams, symmetrize_output=False, implementation=operand.implementation)
        return operand.apply(q, x, last=last)

    def run(step: Step, x: Any, *, last: bool) -> Any:
        return apply(step, x, *grams(step, x, 1.0), last=last)

    step = steps[0]
    if loop is not None:
        step = dataclasses.replace(schedule.step_at(loop[0], dtype), noisy=step.noisy)
    gram, *residual = grams(step, x, normalization.gain**2)
    x, gram, s, factor = normalization(x, gram, operand.spread)
    last = loop is None and len(steps) == 1
    x = apply(step.scaled(s, factor), x, gram, *residual, last=last)
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
    product = functools.partial(syrkx, implementation=operand.implementation)
    parts = segments(schedule, gram.dtype)
    for index, steps in enumerate(parts):
        if index:
            (gram,), s, factor = operand.gram(x), 1.0, 1.0
        q = _segment(product, gram, steps, s, factor)
        x = operand.apply(q, x, last=index == len(parts) - 1)
    return x


def _segment(
    syrkx: Callable[..., jax.Array],
    gram: jax.Array,
    steps: tuple[Step, ...],
    s: float | jax.Array,
    factor: float | jax.Array,
) -> jax.Array:
    """factor times the product of the steps' factors, from R = s²·gram on; shape `(..., m, m)`.

    All products are of one kind, for one program: R² is R·Rᵀ by `syrkx`, with R for an addend.
    """
    r, scale, factors = gram, s**2, []
    *others, (a, b, c) = (step.triple for step in steps)
    for a_i, b_i, c_i in others:
        z = syrkx(r, r, r, alpha=c_i * scale**2, beta=b_i * scale)
        t = syrkx(r, z, r, alpha=scale, beta=a_i * scale)
        r, scale = syrkx(t, z, t, beta=a_i), 1.0
        factors.append((z, a_i))
    c_matrix, beta = r, factor * b * scale
    if steps[-1].noisy:
        amplitude, noise = noise_addend(r)
        c_matrix, beta = (r, noise), (beta, amplitude * factor * a)
    q = syrkx(r, r, c_matrix, alpha=factor * c * scale**2, beta=beta, diagonal=factor * a)
    for z, a_i in reversed(factors):
        q = syrkx(z, q, q, beta=a_i)
    return q
