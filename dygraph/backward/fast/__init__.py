"""Leaf layers whose backward is computed in less time, with autograd's bits, under every schedule.

Start with ``forwards.py``; ``trial.py`` finds out whether bits are the same.

Entered by: ``forwards``.
"""
