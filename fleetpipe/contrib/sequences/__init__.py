"""Attention over sequences that are split over ranks, along sep and along cp.

Start with ``attention.py``; ``parts.py`` computes which positions each rank has.
"""

from __future__ import annotations

from fleetpipe.contrib.sequences.attention import attention
from fleetpipe.contrib.sequences.context_parallel import ContextParallel, PrepareContextParallel
from fleetpipe.contrib.sequences.parts import (
    SequenceRanks,
    documents_of,
    own_part,
    places,
    sequence_ranks,
)

__all__ = [
    "ContextParallel",
    "PrepareContextParallel",
    "SequenceRanks",
    "attention",
    "documents_of",
    "own_part",
    "places",
    "sequence_ranks",
]
