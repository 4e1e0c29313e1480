"""Recomputes coefficients: fitted composed schedules, and compositions of minimax quintics."""
