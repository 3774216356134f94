"""Saves and loads the state of a pipeline's stages.

``files.py`` writes arrays by name to disk, and exports the whole network. The replacements of
Paddle's functions, in ``entry``, call it.
"""
