"""The kernels lowered through Triton, for NVIDIA GPUs since Ampere."""
