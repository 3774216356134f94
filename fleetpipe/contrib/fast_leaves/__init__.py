"""Faster ways to the same bits, on CPUs, for leaf layers whose backward is not split."""
