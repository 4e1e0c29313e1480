"""What muon will do, told before it does it."""
