"""Paddle's older representation, Program. Start with ``reader.py``.

``loader.py`` is for Paddle's own loaders, which read within a program; ``entry`` calls it.
"""
