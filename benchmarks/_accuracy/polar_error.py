"""The distance of `newton_schulz` to the polar factor, and its FLOPs, by coefficients."""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._accuracy.spectra import Case
from muon_jax import newton_schulz
from muon_jax._iteration.coefficients import NAMED, SCHEDULES

METHODS = ("standard", "gram")
DTYPES = ("float32", "bfloat16", "float16")

# An error is that of the directions with σ > threshold·σ₁.
THRESHOLDS = (1e-2, 1e-3)
# A result with a larger singular value, or with a NaN, is a blow-up.
LARGEST_ALLOWED = 1.5
# Names for coefficients with other arguments than theirs: what fitting a set to AOL brings.
COMBINED = {
    "standard_after_aol": {"ns_coeffs": "standard", "ns_steps": 4, "preconditioning": "aol"}
}


def coefficient_names() -> list[str]:
    """Returns the names that `ns_coeffs` takes, those of composed schedules included."""
    return [*NAMED, *SCHEDULES]


def add_variants(command: argparse.ArgumentParser, combined: Iterable[str] = ()) -> None:
    """Adds `--names`, with `combined` ones, `--methods` and `--dtypes`; all by default."""
    names = [*coefficient_names(), *combined]
    command.add_argument("--names", nargs="+", choices=names, default=names)
    command.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    command.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])


def offered_variants(
    names: Sequence[str], methods: Sequence[str], dtypes: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yields (name, method, dtype) for each combination that `newton_schulz` offers.

    A composed schedule has one form under all methods. It comes under the first method only.
    """
    for name, method, dtype in itertools.product(names, methods, dtypes):
        is_new = name not in SCHEDULES or method == methods[0]
        if is_new and is_offered(name, method, dtype):
            yield name, method, dtype


def is_offered(name: str, method: str, dtype: str = "auto") -> bool:
    """Returns whether `newton_schulz` takes the coefficients `name` in that form and dtype."""
    try:
        jax.eval_shape(orthogonalizer(name, method, dtype), np.ones((1, 1), np.float32))
    except ValueError:
        return False
    return True


def arguments_for_coefficients(name: str) -> dict[str, Any]:
    """Returns the arguments with which `newton_schulz` takes the coefficients `name`."""
    if name in COMBINED:
        return COMBINED[name]
    return {"ns_coeffs": name, "preconditioning": "aol" if name.startswith("aol") else "frobenius"}


def orthogonalizer(
    name: str, method: str = "standard", dtype: str = "auto"
) -> Callable[..., jax.Array]:
    """Returns `newton_schulz` with the coefficients `name`, in that form and dtype."""
    return functools.partial(
        newton_schulz, dtype=dtype, method=method, **arguments_for_coefficients(name)
    )


def measure_accuracy(name: str, method: str, dtype: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Orthogonalizes the cases with the coefficients `name`, by `method`, in `dtype`.

    Coefficients made for the preconditioning "aol" run with it. Their error includes the change
    that this preconditioning makes to the polar factor.

    Returns:
        `name`, `method`, `dtype` and `preconditioning`; `units`, the `symmetric_units` by aspect;
        `cases`, the `polar_metrics` of each case.
    """
    orthogonalize = orthogonalizer(name, method, dtype)
    counted = functools.partial(orthogonalize, implementation="xla")
    shapes = dict.fromkeys(case.x.shape for case in cases)
    measurement: dict[str, Any] = {"name": name, "method": method, "dtype": dtype}
    measurement["preconditioning"] = arguments_for_coefficients(name)["preconditioning"]
    units = {f"{n / m:g}": _to_four_digits(symmetric_units(counted, (m, n))) for m, n in shapes}
    measured = [
        {"spectrum": case.spectrum, "shape": case.x.shape}
        | polar_metrics(case, np.asarray(orthogonalize(case.x)))
        for case in cases
    ]
    return measurement | {"units": units, "cases": measured}


def polar_metrics(case: Case, result: np.ndarray) -> dict[str, Any]:
    """Returns how `result`, O of shape (m, n), differs from the polar factor UVᵀ of X = UΣVᵀ.

    Uₖ and Vₖ are the k singular vectors for σ > t·σ₁. All is computed in float64.

    Returns:
        `errors`: ‖UₖᵀO - Vₖᵀ‖_F/√k for each t of `THRESHOLDS`, an RMS over directions;
        `rms`: ‖UₖᵀO‖_F/√k for the last t, the RMS singular value of O there;
        `largest`: the largest singular value of O;
        `dual`: ⟨X, O⟩/‖X‖_*, which is 1 for the polar factor;
        `blow_up`: whether `largest` exceeds `LARGEST_ALLOWED` or O is not finite. If O is not
        finite, all numbers are None.
    """
    if not np.isfinite(result).all():
        numbers = dict.fromkeys(("rms", "largest", "dual"))
        return {"errors": [None] * len(THRESHOLDS), **numbers, "blow_up": True}
    o = result.astype(np.float64)
    projected, errors, rms = case.u.T @ o, [], 0.0
    for threshold in THRESHOLDS:
        k = int(np.sum(case.sigma > threshold * case.sigma[0]))
        errors.append(np.linalg.norm(projected[:k] - case.vt[:k]) / math.sqrt(k))
        rms = np.linalg.norm(projected[:k]) / math.sqrt(k)
    largest = math.sqrt(max(np.linalg.eigvalsh(o @ o.T)[-1], 0))
    return {
        "errors": [_to_four_digits(error) for error in errors],
        "rms": _to_four_digits(rms),
        "largest": _to_four_digits(largest),
        "dual": _to_four_digits(np.sum(case.x * o) / np.sum(case.sigma)),
        "blow_up": largest > LARGEST_ALLOWED,
    }


def symmetric_units(orthogonalize: Callable[..., jax.Array], shape: tuple[int, int]) -> float:
    """Returns the FLOPs of the products in `orthogonalize`, in units of m³, m the smaller side.

    A unit is one symmetric product of m×m matrices, half of which is computed. The products are
    those of the traced program:

    - A·Bᵀ, which sums over the last axes of both, stands for `syrk` or `syrkx` and counts by half.
    - Any other product counts in full.

    Args:
        orthogonalize: a function of one matrix, with implementation `"xla"`.
        shape: (m, n) of the matrix.

    Raises:
        NotImplementedError: the program has a loop.
    """
    traced = jax.make_jaxpr(orthogonalize)(jax.ShapeDtypeStruct(shape, jnp.float32))
    return _flops_of_products(traced.jaxpr) / min(shape) ** 3


def _flops_of_products(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind == "dot_general":
            left, right = (operand.aval for operand in equation.invars)
            (((axis,), (right_axis,)), _) = equation.params["dimension_numbers"]
            flops = 2 * math.prod(equation.outvars[0].aval.shape) * left.shape[axis]
            total += flops / 2 if right_axis == right.ndim - 1 else flops
        elif kind in ("while", "scan"):
            raise NotImplementedError(
                f"orthogonalize needs unrolled steps for its FLOPs to be counted, got a {kind}"
                " loop: write its steps as a Python loop"
            )
        elif "jaxpr" in equation.params:
            total += _flops_of_products(equation.params["jaxpr"].jaxpr)
    return total


def _to_four_digits(value: float) -> float:
    """Four significant digits, because people compare reports."""
    return float(f"{value:.4g}")
