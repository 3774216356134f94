"""Which samples a rank reads, and in which order; how a run goes on where it was interrupted.

Begin with ``sampler.py``: an epoch's order belongs to the job, replicas take turns in it, and the
position in it is a number of samples of the whole job. ``loader.py`` carries that position past
what is loaded ahead; ``position.py`` has both, and that of data that cannot be entered in the
middle. ``sample_streams.py`` has the random numbers of a sample.
"""

from fleetpipe.io.loader import DataLoader
from fleetpipe.io.sample_streams import sample_generator
from fleetpipe.io.sampler import DistributedBatchSampler

__all__ = ["DataLoader", "DistributedBatchSampler", "sample_generator"]
