"""Newton–Schulz as others write it: in jnp, in optax, and in torch where that is installed."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from optax.contrib import _muon as optax_muon

from benchmarks._times.timing import JaxProgram, Timeable
from muon_jax._iteration.coefficients import NAMED

# The rivals in torch of each measurement, and the package that each comes from.
_IN_TORCH = {
    "newton_schulz": {
        "torch.compile": "torch",
        "torch.compile, CUDA graphs": "torch",
        "gram_newton_schulz": "gram_newton_schulz",
        "gram_newton_schulz, standard": "gram_newton_schulz",
        "dion": "dion",
        "dion, aol": "dion",
    },
    "syrk": {"quack": "quack"},
    "syrk + C": {"quack + C": "quack"},
}
# The distributions whose versions decide how fast a package is, where they are not its own name.
_DISTRIBUTIONS = {
    "gram_newton_schulz": ("gram_newton_schulz", "quack-kernels", "nvidia-cutlass-dsl"),
    "quack": ("quack-kernels", "nvidia-cutlass-dsl"),
}
# The coefficients of rivals that have their own. The others compute `newton_schulz_in_jnp`.
OWN_COEFFICIENTS = {"dion": "dion", "dion, aol": "aol"}


def newton_schulz_in_jnp(x: jax.Array) -> jax.Array:
    """Runs Keller Jordan's five steps on `(..., m, n)` as everybody writes them, in its dtype."""
    ((a, b, c),) = NAMED["standard"]
    x /= jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def newton_schulz_in_optax(x: jax.Array) -> jax.Array:
    """Runs the iteration of `optax.contrib.muon` on `(..., m, n)`, in its dtype."""
    (triple,) = NAMED["standard"]
    last_two_axes = optax_muon.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return optax_muon.orthogonalize_via_newton_schulz(
        x, jnp.asarray(triple), dimension_numbers=last_two_axes
    )


def rival_programs(measured: str, *arguments: jax.Array) -> dict[str, Timeable]:
    """Returns the rivals that can run here, all but plain jnp.

    Args:
        measured: `"newton_schulz"` of X, `"syrk"` of X, or `"syrk + C"` of X and C.
        arguments: these arrays.
    """
    rivals: dict[str, Timeable] = {}
    if measured == "newton_schulz":
        (x,) = arguments
        for name, dtype in {"f32": jnp.float32, "bf16": jnp.bfloat16}.items():
            rivals[f"optax {name}"] = JaxProgram.compile(newton_schulz_in_optax, x.astype(dtype))
    if names := [name for name in _IN_TORCH[measured] if name not in absent_rivals(measured)]:
        from benchmarks._times.rivals_in_torch import torch_programs

        rivals |= torch_programs(arguments, names)
    return rivals


def absent_rivals(*measured: str) -> dict[str, str]:
    """Returns the rivals that cannot run here, with the reason."""
    reasons = {name: _reason_missing(package) for name, package in _in_torch(measured).items()}
    return {name: reason for name, reason in reasons.items() if reason}


def torch_versions(*measured: str) -> dict[str, str]:
    """Returns the versions of torch and of the packages of the rivals that can run here."""
    absent = absent_rivals(*measured)
    packages = {package for name, package in _in_torch(measured).items() if name not in absent}
    packages |= {"torch"} if packages else set()
    names = [
        name for package in sorted(packages) for name in _DISTRIBUTIONS.get(package, (package,))
    ]
    return {name: importlib.metadata.version(name) for name in names}


def leave_memory_to_torch() -> None:
    """Makes XLA allocate memory as it needs it, if torch is installed.

    Call this before the first use of a device.
    """
    if importlib.util.find_spec("torch"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _in_torch(measured: Iterable[str]) -> dict[str, str]:
    """The package of each rival in torch of these measurements."""
    return {name: package for key in measured for name, package in _IN_TORCH[key].items()}


def _reason_missing(package: str) -> str | None:
    """The reason why rivals of a package cannot run here, or None."""
    for needed in ("torch", package):
        if importlib.util.find_spec(needed) is None:
            return f"{needed} is not installed"
    import torch  # pyright: ignore[reportMissingImports] (optional)

    if jax.default_backend() != "gpu" or not torch.cuda.is_available():
        return "jax and torch do not share a GPU"
    return None
