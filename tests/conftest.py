"""Eight CPU devices where there is no GPU; the `gpu` marker."""

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("thorough")  # where a test can draw more, it does

jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(items):
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_runtest_setup(item):
    """Most programs are compiled a third sooner, at the cost of their speed."""
    is_sooner = not item.get_closest_marker("optimized") and jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", is_sooner)
