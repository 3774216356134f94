"""Reads a rank's samples in order, and goes on after an interruption where the run stopped.

Begin with ``sampler.py``: an epoch has one order for the whole job, which replicas share, and the
position in it is a number of samples of all replicas. ``loader.py`` counts only batches that the
training has taken; ``position.py`` saves and restores positions. ``sample_streams.py`` seeds the
random numbers of each sample. ``PackedText`` is from an extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetpipe.extras import late
from fleetpipe.io.loader import DataLoader
from fleetpipe.io.sample_streams import sample_generator
from fleetpipe.io.sampler import DistributedBatchSampler

if TYPE_CHECKING:
    from fleetpipe.contrib.text import PackedText as PackedText

__all__ = ["DataLoader", "DistributedBatchSampler", "PackedText", "sample_generator"]

if not TYPE_CHECKING:  # to a type checker it would give the module every name
    __getattr__ = late({"PackedText": "fleetpipe.contrib.text"})
