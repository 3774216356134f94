"""Runs a user's training script: as ``python SCRIPT`` does, or on several ranks at once."""

from __future__ import annotations
