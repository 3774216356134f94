"""Cuts sequences into chunks, and keeps what layers need of the earlier chunks.

Layers call :func:`earlier` and :func:`keep`. A pipeline whose schedule cuts sequences loads
``chunks.py``; start there.
"""

from __future__ import annotations

from fleetpipe.contrib.slices.kept import earlier, keep

__all__ = ["earlier", "keep"]
