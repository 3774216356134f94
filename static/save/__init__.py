"""What the stages have, saved and loaded.

Start with ``state.py``, arrays by name; ``files.py`` is that on disk, and exports the whole
network, ``checkpoint.py`` is what a checkpoint takes of it. What stands in the place of
Paddle's own functions, in ``entry``, calls it.
"""
