"""Saves and loads the state of a pipeline's stages.

Start with ``state.py``, arrays by name; ``files.py`` writes them to disk, and exports the whole
network; ``checkpoint.py`` serves checkpoints. The replacements of Paddle's functions, in ``entry``,
call it.
"""
