"""Benchmarks: `python -m muon_jax.benchmarks --help`."""
