"""Reads programs in Paddle's older representation, Program. Start with ``program_reader.py``.

``program_loader.py`` handles Paddle's own loaders, which read within a program; ``entry`` calls it.
"""
