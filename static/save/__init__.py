"""What the stages have, saved and loaded.

Start with ``state.py``, arrays by name; ``files.py`` is that on disk, ``checkpoint.py`` what a
checkpoint takes of it, ``inference.py`` exports the whole network. What stands in the place of
Paddle's own functions, in ``entry``, calls it.

Entered by: ``checkpoint``, ``files``, ``inference``, ``state``.
"""
