"""How far results are from the polar factor, and at how many FLOPs."""
