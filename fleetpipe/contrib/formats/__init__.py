"""Reads and writes the checkpoints of other programs, and converts any of them to any other.

A reader turns files into a ``contents.Checkpoint``, a writer does the reverse. Start with
``convert.py``, which has the table of formats and also loads a checkpoint into a job directly.
``name_map.py`` renames tensors. Each tensor is read when it is written, one after another.
"""

from __future__ import annotations
