"""`syrk_chain`: symmetric products, each a square of the one before with some addends."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels import _device
from pallas_kernels._mosaic_gpu import chain as mosaic_gpu
from pallas_kernels._selection import as_one_stack, select_implementation, unsupported_reason
from pallas_kernels._syrk import Coefficient, syrk, syrk_with_residual


class Link(NamedTuple):
    """One product of a chain, Sⱼ = alpha·Sⱼ₋₁² + Σ beta·C + diagonal·I.

    Attributes:
        alpha, diagonal: real coefficients, each a scalar, or one for each matrix.
        addends: pairs of beta and the number of C. Numbers count the inputs, then the results and
            residuals in the order in which they are made.
        residual: whether a later product reads the residual, what the rounding of Sⱼ left.
    """

    alpha: Coefficient
    addends: tuple[tuple[Coefficient, int], ...]
    diagonal: Coefficient
    residual: bool = False


def syrk_chain(
    inputs: Sequence[jax.Array],
    links: Sequence[Link],
    *,
    symmetrize_output: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the last result of a chain of symmetric products.

    `"mosaic_gpu"` runs the chain in one launch where that is faster. Its result is the same as that
    of a launch for each product, bit for bit.

    Args:
        inputs: S₀, symmetric, of shape `(..., m, m)`; then other addends, of shape `(..., m, m)` or
            `(m, m)`.
        links: the products.
        symmetrize_output, implementation: as for `syrk`.
    """
    first = inputs[0]
    structure = tuple((tuple(c for _, c in link.addends), link.residual) for link in links)
    chosen = implementation or _fastest_chain(first, structure, len(inputs), symmetrize_output)
    if chosen == "mosaic_gpu" and _in_one_launch(first, structure, len(inputs)):
        coefficients = tuple(
            (link.alpha, link.diagonal, *(beta for beta, _ in link.addends)) for link in links
        )
        return mosaic_gpu.mosaic_syrk_chain(inputs, structure, coefficients)
    options: dict[str, Any] = {
        "symmetrize_output": symmetrize_output,
        "implementation": implementation,
    }
    terms, result = [*inputs], first
    for link in links:
        options |= {"alpha": link.alpha, "diagonal": link.diagonal}
        options["beta"] = tuple(beta for beta, _ in link.addends)
        cs = tuple(terms[c] for _, c in link.addends)
        if link.residual:
            terms += syrk_with_residual(result, cs, **options)
        else:
            terms.append(syrk(result, cs, **options))
        result = terms[-1 - link.residual]
    return result


def _fastest_chain(
    first: jax.Array, structure: mosaic_gpu.Structure, num_inputs: int, symmetrize_output: bool
) -> str:
    """Returns the implementation that None stands for, which for small matrices is one launch."""
    fits = mosaic_gpu.fits_shared_memory(first.shape[-1], structure, num_inputs)
    if fits and not unsupported_reason("mosaic_gpu", first):
        return "mosaic_gpu"
    return select_implementation(
        first, addend=True, symmetrize_output=symmetrize_output
    ).implementation


def _in_one_launch(first: jax.Array, structure: mosaic_gpu.Structure, num_inputs: int) -> bool:
    batch, m, _ = as_one_stack(first.shape)
    if m % 64 or not batch:
        return False
    if mosaic_gpu.fits_shared_memory(m, structure, num_inputs):
        return True
    config = mosaic_gpu.fastest_chain_config(batch, m, _device.num_multiprocessors())
    return config is not None
