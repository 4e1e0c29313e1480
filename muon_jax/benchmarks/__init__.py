"""Benchmarks: `python -m muon_jax.benchmarks --help`.

Rooms in the order of their imports. A room imports from itself and from rooms above it.

- `_records`: files of measurements, and the command `report`.
- `_accuracy`: the distance to the polar factor, and the command `accuracy`.
- `_times`: the commands `syrk`, `newton_schulz`, `muon`, `sharded` and `tune`.
- `_training`: the losses of a small GPT, and the command `training`; imports from `_records` only.
- `_coefficients`: the command `coefficients`; imports from no other room.
"""
