"""Sequence chunks: what layers keep from one to the next, and how a batch is cut into them.

Layers call :func:`earlier` and :func:`keep`. ``chunks.py`` is what a pipeline loads when its
schedule cuts sequences; start there.
"""

from __future__ import annotations

from fleetpipe.contrib.slices.kept import earlier, keep

__all__ = ["earlier", "keep"]
