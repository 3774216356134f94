"""Paddle's groups of ranks, and the stores through which Gloo connects them."""
