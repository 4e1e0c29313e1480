"""How far `newton_schulz` is from the polar factor, and at how many FLOPs, by coefficients."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_jax import newton_schulz
from muon_jax._iteration.fitted import SCHEDULES
from muon_jax._iteration.published import NAMED
from muon_jax.benchmarks._spectra import Case

METHODS = ("standard", "gram")
DTYPES = ("float32", "bfloat16", "float16")

# Errors are those of the directions with σ > threshold · σ₁.
THRESHOLDS = (1e-2, 1e-3)
# A result with a larger singular value, or with a NaN, is a blow-up.
LARGEST_ALLOWED = 1.5


def names() -> list[str]:
    """Returns the coefficients that there are by name, those of composed schedules too."""
    return [*NAMED, *SCHEDULES]


def variants(
    names: Sequence[str], methods: Sequence[str], dtypes: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yields the name, the method and the dtype of all that is offered.

    Composed schedules, which have one form under either method, come under the first.
    """
    for name, method, dtype in itertools.product(names, methods, dtypes):
        is_new = name not in SCHEDULES or method == methods[0]
        if is_new and is_offered(name, method, dtype):
            yield name, method, dtype


def is_offered(name: str, method: str, dtype: str = "auto") -> bool:
    """Returns whether `newton_schulz` takes coefficients of that name in that form and dtype."""
    try:
        jax.eval_shape(_orthogonalize(name, method, dtype), np.ones((1, 1), np.float32))
    except ValueError:
        return False
    return True


def arguments(name: str) -> dict[str, str]:
    """Returns what `newton_schulz` needs for the coefficients of that name."""
    return {"ns_coeffs": name, "preconditioning": "aol" if name.startswith("aol") else "frobenius"}


def _orthogonalize(name, method, dtype):
    return functools.partial(newton_schulz, dtype=dtype, method=method, **arguments(name))


def measure(name: str, method: str, dtype: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Orthogonalizes the cases with the coefficients of that name, by `method`, in `dtype`.

    Coefficients made for the preconditioning "aol" have it, and what it does to the polar factor
    is part of their error.

    Returns:
        `name`, `method`, `dtype`, `preconditioning`, `units`, the `symmetric_units` by aspect, and
        `cases`, the `metrics` of each.
    """
    orthogonalize = _orthogonalize(name, method, dtype)
    counted = functools.partial(orthogonalize, implementation="xla")
    shapes = dict.fromkeys(case.x.shape for case in cases)
    measurement: dict[str, Any] = {"name": name, "method": method, "dtype": dtype}
    measurement["preconditioning"] = arguments(name)["preconditioning"]
    units = {f"{n / m:g}": _rounded(symmetric_units(counted, (m, n))) for m, n in shapes}
    measured = [
        {"spectrum": case.spectrum, "shape": case.x.shape}
        | metrics(case, np.asarray(orthogonalize(case.x)))
        for case in cases
    ]
    return measurement | {"units": units, "cases": measured}


def metrics(case: Case, result: np.ndarray) -> dict[str, Any]:
    """Returns how `result`, O, differs from the polar factor UVᵀ of X = UΣVᵀ.

    With Uₖ and Vₖ the k singular vectors for σ > t·σ₁, all in float64:

    - `errors`: ‖UₖᵀO - Vₖᵀ‖_F/√k for t of `THRESHOLDS`, an RMS over directions;
    - `rms`: ‖UₖᵀO‖_F/√k for the last t, the RMS singular value there;
    - `largest`: the largest singular value of O;
    - `dual`: ⟨X, O⟩/‖X‖_*, which is 1 for the polar factor;
    - `blow_up`: whether `largest` exceeds `LARGEST_ALLOWED`, or O is not finite. Where it is not,
      all numbers are None.
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
        "errors": [_rounded(error) for error in errors],
        "rms": _rounded(rms),
        "largest": _rounded(largest),
        "dual": _rounded(np.sum(case.x * o) / np.sum(case.sigma)),
        "blow_up": largest > LARGEST_ALLOWED,
    }


def symmetric_units(orthogonalize, shape: tuple[int, int]) -> float:
    """Returns the FLOPs of the products in `orthogonalize`, in units of m³, m the smaller side.

    A unit is one symmetric product of m×m matrices, computed by half. The products are those of the
    traced program of implementation `"xla"`, where A·Bᵀ, which sums along the last axes of both,
    stands for a product of `syrk` or `syrkx`, and counts by half, and any other counts in full.
    """
    traced = jax.make_jaxpr(orthogonalize)(jax.ShapeDtypeStruct(shape, jnp.float32))
    return _flops(traced.jaxpr) / min(shape) ** 3


def _flops(jaxpr) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind == "dot_general":
            left, right = (operand.aval for operand in equation.invars)
            (((axis,), (right_axis,)), _) = equation.params["dimension_numbers"]
            flops = 2 * math.prod(equation.outvars[0].aval.shape) * left.shape[axis]
            total += flops / 2 if right_axis == right.ndim - 1 else flops
        elif kind in ("while", "scan"):
            raise NotImplementedError("FLOPs are counted of unrolled steps only")
        elif "jaxpr" in equation.params:
            total += _flops(equation.params["jaxpr"].jaxpr)
    return total


def _rounded(value: float) -> float:
    """Four significant digits: reports are compared by people."""
    return float(f"{value:.4g}")
