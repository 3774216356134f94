"""Parameters and programs of a static pipeline, saved and loaded.

Start with ``state.py``; ``files.py`` is its form on disk, ``inference.py`` the exported network.
"""
