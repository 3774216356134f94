"""Paddle's older representation, Program. Start with ``reader.py``."""
