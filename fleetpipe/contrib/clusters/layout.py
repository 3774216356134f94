"""A layout: the degrees by which a job is split, the schedule, and the micro-batch size."""

from __future__ import annotations

from typing import NamedTuple

from fleetpipe.contrib.clusters.cluster import Group


class JobLayout(NamedTuple):
    """The split of a job among ranks. The order of axes is Fleet's: tensor innermost, data outside.

    Attributes:
        pipeline: Ranks of a pipeline.
        tensor: Ranks that share each weight.
        data: Replicas that each store the whole optimizer state.
        sharding: Replicas among which the optimizer's state is split.
        context: Ranks that share each sequence.
        expert: Ranks that share the experts, among those with different sequences.
        schedule: The schedule's name.
        chunks: Chunks on each rank.
        micro_batch: Sequences of a micro-batch.
        recompute: "none", "selective" or "full".
        sharding_stage: 1 splits the optimizer's state, 2 gradients too, 3 parameters too.
        sequence_parallel: Whether norms and residuals are shared by the ranks of ``tensor`` too.
    """

    pipeline: int = 1
    tensor: int = 1
    data: int = 1
    sharding: int = 1
    context: int = 1
    expert: int = 1
    schedule: str = "1F1B"
    chunks: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    sharding_stage: int = 1
    sequence_parallel: bool = True

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.pipeline * self.tensor * self.context * self.replicas

    @property
    def replicas(self) -> int:
        """Number of pipelines, each with its own data."""
        return self.data * self.sharding

    @property
    def of_layers(self) -> JobLayout:
        """The layout reduced to the fields on which layers' costs depend."""
        return JobLayout()._replace(**{name: getattr(self, name) for name in _OF_LAYERS})

    @property
    def shards(self) -> Group:
        """The group of ranks that split the optimizer's state."""
        return (self.sharding, self.tensor * self.context)

    @property
    def copies(self) -> Group:
        """The group of ranks with the same parameters and the same optimizer shard."""
        return (self.data, self.tensor * self.context * self.sharding * self.pipeline)

    @property
    def neighbour(self) -> int:
        """The distance between the rank numbers of neighbours in a pipeline."""
        return self.tensor * self.context * self.sharding

    def micro_batches(self, batch: int) -> int:
        """Returns the micro-batches of a batch; 0 if the batch cannot be divided so.

        Args:
            batch: Sequences that all replicas train on in a step.
        """
        count, rest = divmod(batch, self.replicas * self.micro_batch)
        return 0 if rest else count

    def __str__(self) -> str:
        degrees = {
            "pp": self.pipeline,
            "tp": self.tensor,
            "cp": self.context,
            "ep": self.expert,
            "dp": self.data,
            "sharding": self.sharding,
        }
        return " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "1"


_OF_LAYERS = ("tensor", "context", "expert", "micro_batch", "recompute", "sequence_parallel")
