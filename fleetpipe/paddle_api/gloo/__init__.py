"""Gloo's groups of ranks, and the stores through which their members find each other."""
