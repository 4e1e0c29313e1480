"""Each file is one optax transformation, or a part of one."""
