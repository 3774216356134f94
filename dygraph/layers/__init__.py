"""One entry of a layer list, which entries are tied, and running a stage's layers.

Start with ``entries.py``.
"""
