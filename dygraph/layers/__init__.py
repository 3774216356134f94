"""The entries of a layer list, tied entries, and running a stage's layers.

Start with ``entries.py``.
"""
