"""Paddle's newer representation, PIR.

Start with ``reader.py``; it is imported only if Paddle has PIR.
"""
