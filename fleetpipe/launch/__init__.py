"""Runs a user's training script: as ``python SCRIPT`` does, or on several ranks at once.

Start with ``script.py``, which runs a script or starts ranks. ``resume.py`` has
``fleetpipe.resume``, ``supervisor/`` the command ``fleetpipe launch``.
"""

from __future__ import annotations
