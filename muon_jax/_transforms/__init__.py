"""Each file is one optax transformation, or one part of the optimizer state."""
