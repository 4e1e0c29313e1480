"""Times products, iterations and whole updates beside others, on one device and on several."""
