"""Text as sequences of tokens: ``fleetpipe.io.PackedText``.

Start with ``packed_text.py``; ``documents.py`` reads the text, ``token_files.py`` has the tokens.
"""

from __future__ import annotations

from fleetpipe.contrib.text.packed_text import PackedText

__all__ = ["PackedText"]
