"""Checkpoints of other programs, and conversion of any to any.

Each format has a reader, which turns files into a ``contents.Checkpoint``, and a writer, which does
the reverse; start with ``convert.py``, which has the table of formats, and loads any of them into a
job directly. ``name_map.py`` renames tensors. Tensors are read one after another, when they are
written.
"""

from __future__ import annotations
