"""The steps at work: each a Gram matrix, products of m × m matrices, and one application.

    R = XXᵀ,   Q = h(R),   X <- QX.

Each step but the first forms R from the rounded X, so rounding does not add up between steps.
Within a step of several products it does: rounding R hides small singular values, which h amplifies
by its slope at 0. Steep steps therefore keep the residuals of R and of the first products
(`Step.residual_betas`), and have noise, which keeps rounding errors from adding up (`Step.noisy`).

In the gram form (`form`), several quintic steps share a Gram matrix and an application.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from muon_jax._iteration.form import segments
from muon_jax._iteration.normalization import Normalization
from muon_jax._iteration.operand import WholeMatrices
from muon_jax._iteration.steps import Schedule, Step, noise_addend
from pallas_kernels import Implementation


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
