"""Imports run muon_jax -> pallas_kernels -> jax, and never back."""

import ast
import sys
from pathlib import Path

import pytest

import muon_jax
import pallas_kernels

ALLOWED = {
    pallas_kernels: {"jax", "numpy", "pallas_kernels"},
    muon_jax: {
        "jax",
        "matplotlib",
        "muon_jax",
        "numpy",
        "optax",
        "pallas_kernels",
        "scipy",
        "sklearn",
    }
    | {"torch", "gram_newton_schulz", "dion"},  # rivals in the benchmarks, where installed
}


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            names.add(node.module)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", ALLOWED, ids=lambda package: package.__name__)
def test_imports(package):
    modules = list(Path(package.__file__).parent.rglob("*.py"))
    assert len(modules) > 3
    for path in modules:
        assert imported_packages(path) - sys.stdlib_module_names <= ALLOWED[package], path
