"""The validation loss that a small GPT reaches under Muon, by coefficients."""
