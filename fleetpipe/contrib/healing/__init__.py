"""Heals a job: a process takes the place of a rank that died, and the others keep theirs.

Start with ``replacing.py``, the launcher's part, and ``survivor.py``, that of a rank which stays.
``replacement.py`` is that of the process which is started; it also connects all of them again.
"""

from __future__ import annotations
