"""Sequences that are split over ranks: along sep by an exchange for heads, along cp in a ring.

Start with ``attention.py``; ``parts.py`` says which places each rank has.
"""

from __future__ import annotations

from fleetpipe.dygraph.sequences.attention import attention
from fleetpipe.dygraph.sequences.context_parallel import ContextParallel, PrepareContextParallel
from fleetpipe.dygraph.sequences.parts import (
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
