"""How long a program takes until its first update is compiled: the command `start`."""
