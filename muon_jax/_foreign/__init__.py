"""Calls in the words of other optimizers, and what to write instead."""
