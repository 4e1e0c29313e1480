"""The kernels of Hopper's own instructions, TMA and wgmma."""
