"""Which samples a rank reads, and in which order; how a run goes on where it was interrupted.

Begin with ``sampler.py``: an epoch's order belongs to the job, replicas take turns in it, and the
position in it is a number of samples of the whole job.
"""

from fleetpipe.io.sampler import DistributedBatchSampler

__all__ = ["DistributedBatchSampler"]
