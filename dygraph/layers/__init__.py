"""The entries of a layer list, tied entries, and the functions that run a stage's layers.

Start with ``entries.py``.
"""
