"""A layout: by what degrees a job is split, under which schedule, in how large micro-batches."""

from __future__ import annotations

from typing import NamedTuple

from fleetpipe.contrib.clusters.cluster import Group


class JobLayout(NamedTuple):
    """How a job is split among ranks. The order of axes is Fleet's: tensor innermost, data outside.

    Attributes:
        pipeline: Ranks of a pipeline.
        tensor: Ranks that share each weight.
        data: Replicas that each keep the optimizer's state whole.
        sharding: Replicas among which it is split.
        context: Ranks that share each sequence.
        expert: Ranks that share the experts, among those with sequences of their own.
        schedule: Its name.
        chunks: Chunks of a rank.
        micro_batch: Sequences of a micro-batch.
        recompute: "none", "selective" or "full".
        sharding_stage: What is split: 1 the optimizer's state, 2 gradients too, 3 parameters too.
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
        """Pipelines that each have data of their own."""
        return self.data * self.sharding

    @property
    def of_layers(self) -> JobLayout:
        """The same without what a layer's costs do not depend on."""
        return JobLayout()._replace(**{name: getattr(self, name) for name in _OF_LAYERS})

    @property
    def shards(self) -> Group:
        """Ranks that split the optimizer's state."""
        return (self.sharding, self.tensor * self.context)

    @property
    def copies(self) -> Group:
        """Ranks with the same parameters and the same part of the optimizer's state."""
        return (self.data, self.tensor * self.context * self.sharding * self.pipeline)

    @property
    def neighbour(self) -> int:
        """Ranks from one of a pipeline to the next."""
        return self.tensor * self.context * self.sharding

    def micro_batches(self, batch: int) -> int:
        """Returns the micro-batches of a batch of so many sequences; 0 where it has no whole ones.

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
