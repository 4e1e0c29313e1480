"""Benchmarks: `python -m benchmarks --help`.

Rooms in the order of their imports. A room imports from itself and from rooms above it.

- `_command_line`: arguments of several commands, and progress on the terminal.
- `_records`: files of measurements, and the command `report`.
- `_accuracy`: the distance to the polar factor, and the command `accuracy`.
- `_times`: the commands `syrk`, `newton_schulz`, `muon` and `sharded`.
- `_start`: the command `start`.
- `_training`: the losses of a small GPT, and the command `training`; imports from the first two.
- `_coefficients`: the command `coefficients`; imports from the first.
"""
