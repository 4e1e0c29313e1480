"""Computes coefficients anew: fitted composed schedules, and compositions of minimax quintics."""
