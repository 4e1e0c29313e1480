"""The noise that keeps rounding errors of equal entries from adding up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._adversary.inputs import half
from muon_jax import newton_schulz
from muon_jax._iteration import coefficients
from muon_jax._iteration.coefficients import NAMED, SCHEDULES, resolve_schedule
from muon_jax._iteration.steps import noise_addend
from pallas_kernels import Implementation

SIXTEEN_BITS = ["float16", "bfloat16"]
by_xla = Implementation(("xla",))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_noise_is_symmetric_uniform_and_small(dtype):
    beta, noise = noise_addend(jnp.zeros((3, 200, 200), dtype))
    assert noise.dtype == dtype
    noise = np.asarray(noise, np.float64)
    np.testing.assert_array_equal(noise, noise.T)
    assert np.abs(noise).max() <= 1 and abs(noise.mean()) < 0.01
    np.testing.assert_allclose(noise.std(), 3**-0.5, rtol=0.01)
    u = float(jnp.finfo(dtype).eps) / 2
    assert 0.55 * u < beta * np.linalg.norm(noise, 2) < 0.65 * u


def test_an_entry_depends_on_its_place_alone():
    (_, small), (_, large) = (noise_addend(jnp.zeros((m, m), jnp.bfloat16)) for m in (40, 100))
    np.testing.assert_array_equal(small, large[:40, :40])


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_entries_of_few_values_get_many(name, dtype):
    x = half(64, 1.297, 0.05).matrix(np.zeros((64, 64)))
    x = jnp.asarray(x / np.linalg.norm(x @ x.T) ** 0.5, dtype)
    step = dataclasses.replace(SCHEDULES[name].steps_in(dtype)[0], residual_betas=())
    many, few = (
        len(np.unique(by_xla.syrk_chain(*h.chain(x @ x.T))))
        for h in (step, dataclasses.replace(step, noisy=None))
    )
    assert few == 3 and many > 10


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_the_first_step_has_noise_and_only_in_16_bits(name):
    for dtype in SIXTEEN_BITS:
        first, *others = SCHEDULES[name].steps_in(dtype)
        assert first.noisy is not None and not any(step.noisy for step in others)
    step, gram = SCHEDULES[name].steps[0], jnp.eye(8) / 8
    with_noise, without = (
        jax.make_jaxpr(lambda r, h=h: by_xla.syrk_chain(*h.chain(r)))(gram)
        for h in (step, dataclasses.replace(step, noisy=None))
    )
    assert str(with_noise) == str(without)


def test_published_sets_have_noise_where_searches_found_need():
    def has_noise(name, dtype):
        return any(step.noisy for step in resolve_schedule(name).steps_in(dtype))

    noisy = {name for name in NAMED if has_noise(name, "bfloat16")}
    assert noisy == {"aol", "aol_nvidia", "deepseek_v4", "polar_express_nanogpt"}
    assert not has_noise("aol", "float16")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_noise_of_quintic_steps_keeps_entries_apart(method, monkeypatch):
    """Columns of a Hadamard matrix, of three lengths."""
    x = half(64, 1.0, 0.2714).matrix(np.zeros((64, 64)))

    def largest():
        result = newton_schulz(x, "aol", preconditioning="aol", dtype="bfloat16", method=method)
        return np.linalg.norm(np.asarray(result, np.float64), 2)

    assert largest() < 1.1
    monkeypatch.setattr(coefficients, "NOISY", frozenset())
    jax.clear_caches()
    assert largest() > 2.5
    jax.clear_caches()
