"""Leaf layers whose backward is computed in less time, with autograd's bits, under every schedule.

Start with ``forwards.py``.
"""
