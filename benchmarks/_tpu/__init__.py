"""What the compiler for TPUs makes of `newton_schulz` and `muon`, on a machine that has no TPU."""
