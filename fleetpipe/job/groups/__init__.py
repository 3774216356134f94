"""Paddle's groups of ranks, and the stores in which Gloo makes them."""
