"""The kernels that use Hopper's own instructions, TMA and wgmma."""
