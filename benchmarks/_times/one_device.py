"""Measures `syrk`, `newton_schulz` and `muon` beside others on one device; checks every result."""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._accuracy.polar_error import arguments_for_coefficients, is_offered
from benchmarks._accuracy.polar_error_on_device import polar_errors
from benchmarks._times.correctness import (
    in_float64,
    largest_error,
    reason_if_wrong,
    relative_error,
)
from benchmarks._times.inputs import standard_normal, symmetric
from benchmarks._times.models import Shapes, dimension_numbers, stacks_of_matrices
from benchmarks._times.rivals import (
    OWN_COEFFICIENTS,
    newton_schulz_in_jnp,
    rival_programs,
)
from benchmarks._times.timing import (
    DEFAULT_TURNS,
    JaxProgram,
    StepProgram,
    Timeable,
    Turns,
    on_gpu,
    rates,
    time_interleaved,
)
from benchmarks._times.updates import COMPARED, IN_16_BITS, random_gradients, step_and_arguments
from muon_jax import NewtonSchulz, newton_schulz
from muon_jax._iteration.coefficients import NAMED, SCHEDULES
from pallas_kernels import gemm, select_implementation, syrk

# The coefficients that `newton_schulz` is timed with beside its defaults, by default.
DEFAULT_COEFFICIENTS = ("fast", "balanced", "accurate", "standard", "polar_express", "aol")
# Largest relative error of these, against float64: several times that of half precision.
COEFFICIENTS_TOLERANCE = 0.1
# Largest relative difference, for each parameter, between our update and optax's: several times the
# rounding of five steps in bfloat16.
MUON_TOLERANCE = 0.1


def measure_syrk(
    shape: tuple[int, ...],
    dtype: str,
    implementations: Sequence[str],
    turns: Turns = DEFAULT_TURNS,
) -> dict[str, Any]:
    """Times XXᵀ, and XXᵀ + C/2 for a symmetric C, for X of `shape`.

    Args:
        shape: (m, n) or (batch, m, n).
        dtype: of X and C.
        implementations: what is timed beside `jnp` and None, by name.
        turns: as for `time_interleaved`.

    Raises:
        ArithmeticError: a result has more than twice the error of plain jnp.
    """
    *batch, m, _ = shape
    x = standard_normal(0, shape, dtype)
    c = symmetric(standard_normal(1, (*batch, m, m), dtype))
    named = {name: functools.partial(syrk, implementation=name) for name in implementations}
    product = {
        "jnp": lambda x: x @ x.mT,
        **named,
        "None": syrk,
        "None, symmetrize_output=False": functools.partial(syrk, symmetrize_output=False),
    }
    product_and_addend = {
        "jnp + C": lambda x, c: x @ x.mT + 0.5 * c,
        **{f"{name} + C": functools.partial(run, beta=0.5) for name, run in named.items()},
        "None + C": functools.partial(syrk, beta=0.5),
    }
    comparison, with_addend = (
        _check_and_time(
            f"{measured} {shape}",
            variants,
            arguments,
            rival_programs(measured, *arguments),
            turns=turns,
        )
        for measured, variants, arguments in (
            ("syrk", product, (x,)),
            ("syrk + C", product_and_addend, (x, c)),
        )
    )
    return {
        "shape": shape,
        "chosen": select_implementation(x).implementation,
        **{key: comparison[key] | with_addend[key] for key in comparison},
    }


def measure_newton_schulz(
    shape: tuple[int, ...],
    dtype: str,
    coefficients: Sequence[str],
    turns: Turns = DEFAULT_TURNS,
) -> dict[str, Any]:
    """Times five Newton–Schulz steps on `shape`, and beside them other coefficients.

    Other coefficients are timed in the standard form. Where n ≥ 3m/2 and they have a gram form, it
    is timed too; on squarer matrices it saves little. The result has the `polar_errors` of all
    programs that were timed, and the `products` of a step, see `measure_products`.

    Args:
        shape: (m, n) or (batch, m, n), m ≤ n.
        dtype: of the matrices.
        coefficients: the names of the other ones.
        turns: as for `time_interleaved`.

    Raises:
        ArithmeticError: our result has more than twice the error of plain jnp, or a result with
            other coefficients an error of more than `COEFFICIENTS_TOLERANCE`.
    """
    *_, m, n = shape
    x = standard_normal(0, shape, dtype)
    steps = {
        "jnp": newton_schulz_in_jnp,
        "None": functools.partial(newton_schulz, dtype=None),
    }

    def definition(name: str) -> Callable[..., jax.Array]:
        return functools.partial(newton_schulz, dtype=None, **arguments_for_coefficients(name))

    others: dict[str, Timeable] = {}
    for name in coefficients:
        run = functools.partial(newton_schulz, **arguments_for_coefficients(name))
        exact = in_float64(definition(name), (x,))
        forms = {} if name == "standard" else {"standard": name}  # "None" is the standard form
        if 2 * n >= 3 * m and name not in SCHEDULES and is_offered(name, "gram"):
            forms["gram"] = f"{name}, gram"
        for form, label in forms.items():
            program = JaxProgram.compile(functools.partial(run, method=form), x)
            error = relative_error(program.result(), exact)
            if not error <= COEFFICIENTS_TOLERANCE:
                raise ArithmeticError(
                    f"newton_schulz {shape}, {label}: the relative error is {error:.2e}, more than"
                    f" {COEFFICIENTS_TOLERANCE}"
                )
            others[label] = program
    definitions = {rival: definition(name) for rival, name in OWN_COEFFICIENTS.items()}
    comparison = _check_and_time(
        f"newton_schulz {shape}",
        steps,
        (x,),
        rival_programs("newton_schulz", x),
        others,
        definitions,
        turns,
    )
    return {
        "shape": shape,
        "chosen": select_implementation(x).implementation,
        **comparison,
        "products": measure_products(x, turns),
        **({"rate": rates()[0]} if on_gpu() else {}),
    }


def measure_products(x: jax.Array, turns: Turns = DEFAULT_TURNS) -> dict[str, Any]:
    """Times the three products of a step by themselves: A = XXᵀ, Q = cA² + bA + aI, and QX.

    QuACK's polynomial is A² + A/2, which is the same work.

    Args:
        x: standard normal, of shape `(..., m, n)`, m ≤ n.
        turns: as for `time_interleaved`.

    Returns:
        For each product its errors and times, and `flops`, the least that it needs: half of those
        of a full product where the result is symmetric.

    Raises:
        ArithmeticError: a result has more than twice the error of plain jnp.
    """
    ((a, b, c),) = NAMED["standard"]
    *batch, m, n = x.shape
    x /= m**0.5 + n**0.5  # the largest singular value, about
    gram = syrk(x)

    def in_jnp(gram: jax.Array) -> jax.Array:
        return c * gram @ gram + b * gram + a * jnp.eye(m, dtype=gram.dtype)

    def by_syrk(gram: jax.Array) -> jax.Array:
        return syrk(gram, gram, alpha=c, beta=b, diagonal=a)

    def half_more(gram: jax.Array) -> jax.Array:
        return gram @ gram + 0.5 * gram

    cases = {
        "XXᵀ": (n, {"jnp": lambda x: x @ x.mT, "None": syrk}, (x,), rival_programs("syrk", x), {}),
        "cA² + bA + aI": (
            m,
            {"jnp": in_jnp, "None": by_syrk},
            (gram,),
            rival_programs("syrk + C", gram, gram),
            {"quack + C": half_more},
        ),
        "QX": (2 * n, {"jnp": jnp.matmul, "None": gemm}, (by_syrk(gram), x), {}, {}),
    }
    return {
        name: {"flops": math.prod(batch) * m * m * inner}
        | _check_and_time(
            f"{name} {x.shape}", variants, arguments, rivals, None, definitions, turns
        )
        for name, (inner, variants, arguments, rivals, definitions) in cases.items()
    }


def measure_muon(model: str, dtype: str, turns: Turns = DEFAULT_TURNS) -> dict[str, Any]:
    """Times what a train step does once it has the gradients of all parameters of a model.

    The update and `optax.apply_updates` are one program. Parameters and state are donated.

    optax has no dtype of the iteration: it iterates in that of the gradients, `dtype`. Its
    `mu_dtype` stores the momentum alone. `"optax, 16 bits"` is optax under
    `jax.default_matmul_precision("BF16_BF16_F32")`.

    Args:
        model: a name of `MODELS`.
        dtype: of gradients, state and parameters.
        turns: as for `time_interleaved`.

    Returns:
        The times of optax's and our steps, and by optimizer
        `temp_bytes`, the memory that a step needs beside its arguments and results;
        `loops`, the number of loops in the program;
        `launches`, the number of kernels that ran, None without a GPU;
        `over_floor`, on a GPU, the time on the device over that of the least work.

    Raises:
        ArithmeticError: an update of ours differs by more than `MUON_TOLERANCE` from that of optax,
            or with other coefficients from the one computed in float32.
    """
    gradients = random_gradients(model, dtype)
    compared: list[tuple[str, Any, str | None]]
    compared = [(name, make, None) for name, make in COMPARED.items()]
    if dtype == "float32":
        compared.insert(1, (IN_16_BITS, COMPARED["optax"], "BF16_BF16_F32"))
    programs, compile_seconds = {}, {}
    for name, make, precision in compared:
        start = time.perf_counter()
        with jax.default_matmul_precision(precision):
            programs[name] = _compile_step(make, gradients)
        compile_seconds[name] = round(time.perf_counter() - start, 2)
    in_float32 = NewtonSchulz("balanced", dtype="float32", method="standard")
    exact = functools.partial(COMPARED["balanced"], ns_coeffs=in_float32)
    # Parameters after one step from zero, which are the updates.
    updates = {name: program.result()[0] for name, program in programs.items()}
    references = {
        IN_16_BITS: ("that in float32", updates["optax"]),
        "None": ("that of optax", updates["optax"]),
        "balanced": ("that computed in float32", _compile_step(exact, gradients).result()[0]),
    }
    errors = {
        name: largest_error(
            updates[name], expected, f"muon {model}, {name}", description, MUON_TOLERANCE
        )
        for name, (description, expected) in references.items()
        if name in updates
    }
    del updates, references
    compiled = {name: program.compiled for name, program in programs.items()}
    measured = {
        "model": model,
        "parameters": sum(gradient.size for gradient in gradients.values()),
        "errors": errors,
        "compile_seconds": compile_seconds,
        "temp_bytes": {k: c.memory_analysis().temp_size_in_bytes for k, c in compiled.items()},
        "loops": {k: c.as_text().count(" while(") for k, c in compiled.items()},
        "launches": {name: program.launches() for name, program in programs.items()},
        "microseconds": time_interleaved(programs, turns),
    }
    if on_gpu():
        shapes = {name: x.shape for name, x in gradients.items()}
        times = {name: by["device"][1] for name, by in measured["microseconds"].items()}
        coeffs = {"None": "standard", "balanced": "balanced"}
        measured["over_floor"] = {
            name: round(times[name] / floor_of_step(shapes, dtype, NewtonSchulz(own)), 3)
            for name, own in coeffs.items()
        }
    return measured


def _compile_step(
    make: Callable[..., optax.GradientTransformation], gradients: dict[str, jax.Array]
) -> StepProgram:
    """The step of an optimizer that takes optax's arguments, compiled."""
    step, arguments = step_and_arguments(make, gradients, jax.tree.map(jnp.zeros_like, gradients))
    return StepProgram(jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile(), arguments)


def floor_of_step(shapes: Shapes, dtype: str, iteration: NewtonSchulz) -> float:
    """Returns the µs of the least work of a step, at the `rates` of this device.

    - The FLOPs of the products, in 16 bits. Half of a symmetric product counts.
    - The bytes of gradients, momenta, moments and parameters, each read, and written but for
      gradients, once.
    """
    flops = sum(
        batch * m**3 * iteration.form((m, n), dtype).products.units(n / m)
        for batch, m, n in stacks_of_matrices(shapes)
    )
    elements = sum(
        math.prod(shapes[name]) * (7 if numbers is None else 5)
        for name, numbers in dimension_numbers(shapes).items()
    )
    of_products, of_copies = rates()
    return 1e6 * (flops / of_products + elements * jnp.dtype(dtype).itemsize / of_copies)


def _check_and_time(
    case: str,
    variants: Mapping[str, Callable[..., jax.Array]],
    arguments: tuple[jax.Array, ...],
    rivals: Mapping[str, Timeable],
    others: Mapping[str, Timeable] | None = None,
    definitions: Mapping[str, Callable[..., jax.Array]] | None = None,
    turns: Turns = DEFAULT_TURNS,
) -> dict[str, dict[str, Any]]:
    """Checks `variants` and `rivals` against the first variant in float64, and times them.

    A result passes if its error is at most twice that of the first variant. A rival that fails is
    reported, and not timed.

    Args:
        case: names the measurement in messages of errors.
        variants: ours, by name.
        arguments: of the variants.
        rivals: by name.
        others: programs that are timed too, unchecked. If there are any, the result has all polar
            errors.
        definitions: what rivals compute instead of the first variant, by rival.
        turns: as for `time_interleaved`.

    Raises:
        ArithmeticError: a variant does not pass.
    """
    baseline, definition = next(iter(variants.items()))
    exact = in_float64(definition, arguments)
    programs: dict[str, Timeable] = {
        name: JaxProgram.compile(function, *arguments) for name, function in variants.items()
    }
    errors, failed = {}, {}
    for name, program in programs.items():
        errors[name] = relative_error(program.result(), exact)
        if wrong := reason_if_wrong(errors[name], baseline, errors[baseline]):
            raise ArithmeticError(f"{case}, {name}: {wrong}")
    for name, program in rivals.items():
        try:
            own = (definitions or {}).get(name)
            expected = in_float64(own, arguments) if own else exact
            errors[name] = relative_error(program.result(), expected)
            wrong = reason_if_wrong(errors[name], baseline, errors[baseline])
        except Exception as error:  # a rival may fail in any way
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
        result["polar_errors"] = polar_errors(arguments[0], results)
    return result | {"microseconds": time_interleaved(programs, turns)}
