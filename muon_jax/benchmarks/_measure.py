"""Measurements of `syrk`, `newton_schulz` and `muon` beside others; every result is checked."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax.contrib

from muon_jax import muon, newton_schulz
from muon_jax._iteration.fitted import SCHEDULES
from muon_jax.benchmarks import _accuracy, _models, _polar, _rivals, _timing
from muon_jax.benchmarks._timing import JaxProgram, Program
from pallas_kernels import select_implementation, syrk

# What `newton_schulz` is timed with beside its defaults, where nothing else is named.
COEFFICIENTS = ("fast", "balanced", "accurate", "standard", "polar_express", "aol")
# Largest relative error of these, against float64: several times that of half precision.
COEFFICIENTS_TOLERANCE = 0.1
# Largest relative difference, for each parameter, between our update and optax's: several times the
# rounding of five steps in bfloat16.
MUON_TOLERANCE = 0.1


def measure_syrk(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Times XXᵀ, and XXᵀ + C/2 for a symmetric C, of one shape.

    Raises:
        ArithmeticError: a result has more than twice the error of plain jnp.
    """
    *batch, m, _ = shape
    x = standard_normal(0, shape, dtype)
    c = symmetric(standard_normal(1, (*batch, m, m), dtype))
    product = {
        "jnp": lambda x: x @ x.mT,
        "xla": functools.partial(syrk, implementation="xla"),
        "None": syrk,
        "None, symmetrize_output=False": functools.partial(syrk, symmetrize_output=False),
    }
    product_and_addend = {
        "jnp + C": lambda x, c: x @ x.mT + 0.5 * c,
        "None + C": lambda x, c: syrk(x, c, beta=0.5),
    }
    comparison = _compare(f"syrk {shape}", product, (x,), {})
    with_addend = _compare(f"syrk {shape}", product_and_addend, (x, c), {})
    return {
        "shape": shape,
        "chosen": select_implementation(x).implementation,
        **{key: comparison[key] | with_addend[key] for key in comparison},
    }


def measure_newton_schulz(
    shape: tuple[int, ...], dtype: str, coefficients: Sequence[str], pause: float = 0.0
) -> dict[str, Any]:
    """Times five Newton–Schulz steps on one shape, and beside them other coefficients.

    Those are timed in both forms where n ≥ 2m and there are two; on squarer matrices the gram form
    costs more.
    `polar_errors` are those of `_polar.errors`, of all that were timed. `pause` is as for
    `_timing.time_interleaved`.

    Raises:
        ArithmeticError: our result has more than twice the error of plain jnp, or with other
            coefficients one of more than `COEFFICIENTS_TOLERANCE`.
    """
    *_, m, n = shape
    x = standard_normal(0, shape, dtype)
    steps = {
        "jnp": _rivals.newton_schulz_in_jnp,
        "None": functools.partial(newton_schulz, dtype=None),
    }

    def definition(name):
        return functools.partial(newton_schulz, dtype=None, **_accuracy.arguments(name))

    others: dict[str, Program] = {}
    for name in coefficients:
        run = functools.partial(newton_schulz, **_accuracy.arguments(name))
        exact = in_float64(definition(name), (x,))
        forms = {} if name == "standard" else {"standard": name}  # that is None's
        if n >= 2 * m and name not in SCHEDULES and _accuracy.is_offered(name, "gram"):
            forms["gram"] = f"{name}, gram"
        for form, label in forms.items():
            program = JaxProgram.compile(functools.partial(run, method=form), x)
            error = _timing.relative_error(program.result(), exact)
            if not error <= COEFFICIENTS_TOLERANCE:
                raise ArithmeticError(
                    f"newton_schulz {shape}, {label}: the relative error is {error:.2e}, more than"
                    f" {COEFFICIENTS_TOLERANCE}"
                )
            others[label] = program
    own = {rival: definition(name) for rival, name in _rivals.COEFFICIENTS.items()}
    rivals = _rivals.programs(x)
    comparison = _compare(f"newton_schulz {shape}", steps, (x,), rivals, others, own, pause)
    return {
        "shape": shape,
        "chosen": select_implementation(x).implementation,
        **comparison,
    }


def measure_muon(model: str, dtype: str) -> dict[str, Any]:
    """Times one update of all parameters of a model, gradients and state in, updates and state out.

    The state is not donated, because the same arguments are timed again and again. `temp_bytes` is
    the memory that an update needs beside its arguments and results, `loops` and `launches` count
    loops in the program and, on a GPU, kernels that ran.

    Raises:
        ArithmeticError: an update of ours is further than `MUON_TOLERANCE` from that of optax, or
            with other coefficients from the one computed in float32.
    """
    shapes = _models.MODELS[model]
    gradients = {
        name: standard_normal(seed, shape, dtype)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    parameters = jax.tree.map(jnp.zeros_like, gradients)
    make = {
        "optax": optax.contrib.muon,
        "None": muon,
        "balanced": functools.partial(muon, ns_coeffs="balanced"),
    }
    programs, compile_seconds = {}, {}
    for name, function in make.items():
        start = time.perf_counter()
        programs[name] = _update(function, gradients, parameters)
        compile_seconds[name] = round(time.perf_counter() - start, 2)
    exact = functools.partial(make["balanced"], ns_method="standard", ns_dtype="float32")
    references = {
        "None": ("that of optax", programs["optax"]),
        "balanced": ("that computed in float32", _update(exact, gradients, parameters)),
    }
    errors = {}
    for name, (description, reference) in references.items():
        updates, expected = (program.result()[0] for program in (programs[name], reference))
        case = f"muon {model}, {name}"
        errors[name] = largest_error(updates, expected, case, description, MUON_TOLERANCE)
        del updates, expected
    compiled = {name: program.compiled for name, program in programs.items()}
    return {
        "model": model,
        "parameters": sum(parameter.size for parameter in parameters.values()),
        "errors": errors,
        "compile_seconds": compile_seconds,
        "temp_bytes": {k: c.memory_analysis().temp_size_in_bytes for k, c in compiled.items()},
        "loops": {k: c.as_text().count(" while(") for k, c in compiled.items()},
        "launches": {name: program.launches() for name, program in programs.items()},
        "microseconds": _timing.time_interleaved(programs),
    }


def largest_error(
    updates: Mapping[str, jax.Array],
    expected: Mapping[str, jax.Array],
    case: str,
    reference: str,
    tolerance: float,
) -> float:
    """Returns the largest relative error of an update, by parameter.

    Raises:
        ArithmeticError: it is more than `tolerance`; `case` and `reference` are for the message.
    """
    errors = {name: _timing.relative_error(updates[name], x) for name, x in expected.items()}
    for name, error in errors.items():
        if not error <= tolerance:
            raise ArithmeticError(
                f"{case}: the update of {name} differs from {reference} by {error:.2e}, relative,"
                f" more than {tolerance}"
            )
    return max(errors.values())


def _update(make, gradients, parameters) -> JaxProgram:
    """The update of an optimizer with optax's arguments, compiled."""
    numbers = _models.dimension_numbers({name: p.shape for name, p in parameters.items()})
    optimizer = make(learning_rate=0.02, muon_weight_dimension_numbers=numbers)
    return JaxProgram.compile(optimizer.update, gradients, optimizer.init(parameters), parameters)


def _compare(
    case: str,
    variants: Mapping[str, Callable[..., jax.Array]],
    arguments: tuple[jax.Array, ...],
    rivals: Mapping[str, Program],
    others: Mapping[str, Program] | None = None,
    own: Mapping[str, Callable[..., jax.Array]] | None = None,
    pause: float = 0.0,
) -> dict[str, dict[str, Any]]:
    """Checks and times `variants` and `rivals`, which compute what the first variant computes.

    Rivals in `own` compute what stands there instead. `others` are timed with them, unchecked; with
    them all polar errors are part of the result.

    A result passes whose error is at most twice that of the first variant, where the exact result
    is that of the first variant in float64. A rival that fails is reported, and not timed.

    Raises:
        ArithmeticError: a variant fails.
    """
    baseline, definition = next(iter(variants.items()))
    exact = in_float64(definition, arguments)
    programs: dict[str, Program] = {
        name: JaxProgram.compile(function, *arguments) for name, function in variants.items()
    }
    errors, failed = {}, {}
    for name, program in programs.items():
        errors[name] = _timing.relative_error(program.result(), exact)
        if wrong := reason_if_wrong(errors[name], baseline, errors[baseline]):
            raise ArithmeticError(f"{case}, {name}: {wrong}")
    for name, program in rivals.items():
        try:
            its_own = (own or {}).get(name)
            expected = in_float64(its_own, arguments) if its_own else exact
            errors[name] = _timing.relative_error(program.result(), expected)
            wrong = reason_if_wrong(errors[name], baseline, errors[baseline])
        except Exception as error:  # whatever a rival cannot do here
            wrong = f"{type(error).__name__}: {error}".partition("\n")[0]
        if wrong:
            failed[name] = wrong
        else:
            programs[name] = program
    del exact
    result: dict[str, dict[str, Any]] = {"errors": errors, "failed": failed}
    if others:
        programs |= others
        results = ((name, program.result()) for name, program in programs.items())
        result["polar_errors"] = _polar.errors(arguments[0], results)
    return result | {"microseconds": _timing.time_interleaved(programs, pause=pause)}


def in_float64(function: Callable[..., jax.Array], arguments: Iterable[jax.Array]) -> jax.Array:
    """Returns the result of `function`, computed in float64."""
    with jax.enable_x64(True):
        return jax.jit(function)(*(x.astype(jnp.float64) for x in arguments))


def reason_if_wrong(error: float, baseline: str, limit: float) -> str | None:
    """Returns what is wrong with an error more than twice that of the baseline, `limit`."""
    if error <= 2 * limit:
        return None
    return f"the relative error is {error:.2e}, more than twice that of {baseline}, {limit:.2e}"


def standard_normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns the input of that number."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def symmetric(x: jax.Array) -> jax.Array:
    """Returns the lower triangle of `x`, mirrored."""
    lower = jnp.tril(x)
    return lower + jnp.tril(lower, -1).mT
