"""A search for matrices whose rounding conspires, so that singular values become too large."""
