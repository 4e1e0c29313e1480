"""The interpreter of Mosaic GPU kernels, as new for each test."""

import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()  # a kernel that raised leaves its memory
