"""The parameters and buffers of the whole model: their fully qualified names, files and copies.

Start with ``names.py``.
"""
