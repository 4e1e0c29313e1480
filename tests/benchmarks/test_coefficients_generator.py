import dataclasses

import chex
import jax
import numpy as np
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks._coefficients import fit
from benchmarks._coefficients.designs import DESIGNS
from benchmarks._coefficients.free import free_coefficients
from benchmarks._coefficients.minimax import minimax_quintic, published_minimax_sets
from benchmarks._coefficients.perturbed_map import map_with_errors
from benchmarks._coefficients.worst_case import turns_of_spike, worst_outputs
from muon_jax._iteration.coefficients import NAMED, SCHEDULES

# Float64's rounding, which differs between CPUs, or units of the last published digit. The 8.20516
# of "polar_express_nvidia" is published as 8.2051.
AS_PUBLISHED = {
    "polar_express": 3e-14,
    "polar_express_nanogpt": 1e-13,
    "polar_express_nvidia": 0.7e-4,
    "cans": 0.5e-4,
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_published_sets(name):
    rows = published_minimax_sets()[name]
    np.testing.assert_allclose(rows, NAMED[name], rtol=0, atol=AS_PUBLISHED[name])


@pytest.mark.parametrize(("low", "high"), [(0.001, 1), (0.3, 2.5), (0.9, 1.1)])
def test_a_quintic_alternates_as_the_best_one_does(low, high):
    a, b, c = minimax_quintic(low, high)
    sigma = np.linspace(low, high, 20_001)
    error = 1 - (a * sigma + b * sigma**3 + c * sigma**5)
    largest = np.abs(error).max()
    stationary = np.flatnonzero(np.diff(np.sign(np.diff(error)))) + 1
    extremes = error[[0, *stationary, -1]]
    np.testing.assert_allclose(extremes, largest * np.array([1, -1, 1, -1]), rtol=1e-6, atol=1e-13)


def test_quintics_of_narrow_intervals_are_the_limit():
    limit = np.array([1.875, -1.25, 0.375]) / 2.0 ** np.array([1, 3, 5])
    np.testing.assert_allclose(minimax_quintic(1.999999, 2), limit)
    np.testing.assert_allclose(minimax_quintic(1.9999, 2), limit, rtol=2e-4)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2, 1), (-1, 1)])
def test_intervals_that_are_none(low, high):
    with pytest.raises(ValueError, match=f"0 < low <= high, got low={low} and high={high}"):
        minimax_quintic(low, high)


each_design = pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*design, marks=pytest.mark.nightly) for design in DESIGNS],
)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.optimized
def test_what_is_generated_is_what_ships():
    # In some directions the objective is flat. The other sets take minutes.
    name, dtype, rtol = "fast", "bfloat16", 1e-3
    steps = fit.fit(DESIGNS[name, dtype])
    shipped = SCHEDULES[name].steps_in(dtype)
    actual, expected = ([dataclasses.astuple(step) for step in each] for each in (steps, shipped))
    chex.assert_trees_all_close(actual, expected, rtol=rtol)


@each_design
def test_schedules_are_at_a_minimum_of_their_objective(name, dtype):
    design = DESIGNS[name, dtype]
    with jax.enable_x64(True):
        free = free_coefficients(design, SCHEDULES[name].steps_in(dtype))

        def cost(free):
            return float(np.sum(fit.objective_terms(design, free) ** 2))

        least = cost(free)
        for direction in np.random.default_rng(0).choice([-1, 1], (4, free.size)):
            assert cost(free * (1 + 1e-3 * direction)) > least


def test_the_worst_case_is_the_sum_of_what_each_error_does():
    (step,) = SCHEDULES["fast"].steps
    with jax.enable_x64(True):
        x, u = np.linspace(0.01, 1.0, 200), 1e-7
        y = map_with_errors((step,), x)
        above, below = worst_outputs((step,), x, u)
        each = u * np.eye(len(step.products), len(step.products) + 1)
        off = sum(np.abs(map_with_errors((step,), x, errors) - y) for errors in each)
        off += u * np.max(np.abs(y / x)) * x  # of h
        np.testing.assert_allclose(above - y, off, rtol=1e-3, atol=1e-9)
        np.testing.assert_allclose(y - below, above - y, rtol=1e-6)


def test_a_spike_turns_by_the_roundings_before_h():
    step, u = SCHEDULES["fast"].steps[0], 1e-7
    with jax.enable_x64(True):
        turns = turns_of_spike(step, u)
        # R off by 0.1u between the directions, less what its residual gives back.
        r = np.array([[1.0, 0.1 * u], [0.1 * u, 0.0]])
        terms = [r]
        for j, product in enumerate(step.products):
            added = sum(beta * terms[i] for beta, i in product.addends)
            term = product.alpha * terms[-1] @ terms[-1] + added + product.diagonal * np.eye(2)
            if j == 0:
                term -= step.residual_betas[0] * (r - np.diag([1.0, 0.0]))
            terms.append(term)
    assert turns.shape == (len(step.products),)
    assert turns[0] == pytest.approx(terms[-1][1, 0] / terms[-1][0, 0], rel=1e-4)


# The largest |S| but for h, and the largest h.
STATED = {
    ("fast", "float16"): (3, 96),
    ("balanced", "float16"): (3.1, 318),
    ("accurate", "float16"): (1 + 1e-6, 110),
    ("accurate", "bfloat16"): (1.2, 39),
}


def test_intermediates_stay_within_what_is_stated():
    sigma = np.append(np.geomspace(1e-6, 1, 4000), np.linspace(0, 1.01, 4000))
    for name, dtype in DESIGNS:
        most, highest = STATED.get((name, dtype), (1 + 1e-6, 39))
        x = sigma
        for step in SCHEDULES[name].steps_in(dtype):
            terms = step.terms(x**2)
            assert np.abs(terms[1:-1]).max() < most, (name, dtype)
            assert np.abs(terms[0]).max() < 6 and np.abs(terms[-1]).max() < highest, (name, dtype)
            x = x * terms[-1]


def test_the_command_says_how_far_what_ships_is(capsys):
    benchmarks.main(["coefficients", "--names", "cans"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cans: within 5e-05 of what ships"
    assert lines[1].startswith("    (8.4703288038") and len(lines) == 7
    with pytest.raises(SystemExit):
        benchmarks.main(["coefficients", "--names", "standard"])
