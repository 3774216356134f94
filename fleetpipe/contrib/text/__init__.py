"""Text as sequences of tokens: ``fleetpipe.io.PackedText``, which is in ``packed_text.py``."""

from __future__ import annotations

from fleetpipe.contrib.text.packed_text import PackedText

__all__ = [
    "PackedText",
]
