"""The parameters and buffers of the whole model: their lasting names, their files, their copies.

Start with ``names.py``.
"""
