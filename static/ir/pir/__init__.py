"""Paddle's newer representation, PIR. Start with ``reader.py``; imported where Paddle has it."""
