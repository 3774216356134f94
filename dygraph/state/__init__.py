"""The parameters and buffers of the whole model: their lasting names, files and copies.

Start with ``names.py``.
"""
