"""Paddle's newer representation, PIR.

Start with ``pir_reader.py``; it is imported only if Paddle has PIR.
"""
