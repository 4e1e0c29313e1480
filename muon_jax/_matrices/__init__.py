"""Which parameters hold matrices, and where in them."""
