"""The work between a forward and the last gradient: recompute, and backward split into I and W.

Start with ``recompute.py`` for recompute, and with ``split.py`` for the split backward.
"""
