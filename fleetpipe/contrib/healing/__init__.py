"""Heals a job: a new process takes the place of a rank that died, and the other ranks stay.

Start with ``replacing.py``, the part of the launcher, and ``survivor.py``, the part of a surviving
rank. ``replacement.py`` is the part of the new process, and connects all ranks again.
"""

from __future__ import annotations
