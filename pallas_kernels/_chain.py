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
    options: dict[str, Any] = {
        "symmetrize_output": symmetrize_output,
        "implementation": implementation,
    }
    first = inputs[0]
    structure = tuple((tuple(c for _, c in link.addends), link.residual) for link in links)
    if len(links) > 1 and _is_one_launch(first, structure, len(inputs), **options):
        coefficients = tuple(
            (link.alpha, link.diagonal, *(beta for beta, _ in link.addends)) for link in links
        )
        return mosaic_gpu.mosaic_syrk_chain(inputs, structure, coefficients)
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


def _is_one_launch(
    first: jax.Array,
    structure: mosaic_gpu.Structure,
    num_inputs: int,
    *,
    symmetrize_output: bool,
    implementation: str | None,
) -> bool:
    """Whether `"mosaic_gpu"` is asked for, or the fastest, and one launch is faster than several.

    For small matrices one launch is the fastest.
    """
    batch, m, _ = as_one_stack(first.shape)
    fits = mosaic_gpu.fits_shared_memory(m, structure, num_inputs)
    if implementation is None and not (fits and not unsupported_reason("mosaic_gpu", first)):
        implementation, _ = select_implementation(
            first, addend=True, symmetrize_output=symmetrize_output
        )
    if implementation not in (None, "mosaic_gpu") or m % 64 or not batch:
        return False
    if fits:
        return True
    config = mosaic_gpu.fastest_chain_config(batch, m, _device.num_multiprocessors())
    return config is not None
