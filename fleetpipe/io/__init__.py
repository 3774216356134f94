"""Reads a rank's samples in order, and goes on after an interruption where the run stopped.

Begin with ``sampler.py``: an epoch's order belongs to the job, replicas take turns in it, and the
position in it is a number of samples of the whole job. ``loader.py`` delays that position until
loaded batches are used; ``position.py`` has both, and the position in data that can only be read
from the start. ``sample_streams.py`` has the random numbers of a sample.
"""

from fleetpipe.io.loader import DataLoader
from fleetpipe.io.sample_streams import sample_generator
from fleetpipe.io.sampler import DistributedBatchSampler

__all__ = ["DataLoader", "DistributedBatchSampler", "sample_generator"]
