"""optax's own tests of its Muon, which its wheel ships, run against ours.

Left out, because they call private functions of optax's module:

- `test_reshape_inverse` (`_compute_muon_reshape`): test_matrix_axes.py has its cases.
- `test_newton_schulz` (`orthogonalize_via_newton_schulz`): test_newton_schulz.py shows that a
  convergent triple gives the polar factor, of complex matrices too.
"""

import types
import unittest

import pytest
from optax.contrib import _muon_test

import muon_jax

LEFT_OUT = ("test_reshape_inverse", "test_newton_schulz")

names = [
    name
    for name in unittest.TestLoader().getTestCaseNames(_muon_test.MuonTest)
    if not name.startswith(LEFT_OUT)
]


@pytest.fixture(autouse=True)
def ours_for_theirs(monkeypatch):
    names = ("muon", "scale_by_muon", "MuonDimensionNumbers")
    ours = types.SimpleNamespace(**{name: getattr(muon_jax, name) for name in names})
    monkeypatch.setattr(_muon_test, "_muon", ours)


def test_the_suite_is_there():
    assert len(names) >= 20


# With "aol" updates outside of jit compile many operations one by one.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if "_aol" in name else []) for name in names],
)
def test_optax(name):
    result = unittest.TestResult()
    _muon_test.MuonTest(name).run(result)
    assert result.testsRun == 1
    assert not result.failures + result.errors, (result.failures + result.errors)[0][1]
