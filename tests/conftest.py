"""Eight CPU devices where there is no GPU; the `gpu` marker."""

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("thorough")  # where a test can draw more, it does

jax.config.update("jax_num_cpu_devices", 8)
# Most of the time of the tests is LLVM's. Kernels for GPUs are compiled in processes of their own.
jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


def pytest_collection_modifyitems(items):
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
