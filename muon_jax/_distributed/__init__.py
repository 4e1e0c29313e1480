"""What is known of shardings, who computes what, and the exchange that does it."""
