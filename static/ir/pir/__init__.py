"""Paddle's newer representation, PIR. Start with ``reader.py``."""
