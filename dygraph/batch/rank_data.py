"""The data of a batch on the ranks of a pipeline: cut, checked, compared and exchanged."""

from __future__ import annotations

import pkgutil

from fleetpipe.aliases import Nest
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.batch.micro_batches import MicroBatchCut, MicroBatches, split
from fleetpipe.dygraph.batch.row_digests import RowComparison
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.schedules import Placement


class RankData:
    """Handles the batches of a pipeline, of which the first and the last stage take a part each.

    Attributes:
        first_owner: The rank that owns the first stage, which takes the inputs.
        last_owner: The rank that owns the last stage, which takes the labels.
        owns_first: Whether this process is that first owner, or plays all ranks.
        owns_last: Whether this process is that last owner, or plays all ranks.
    """

    def __init__(self, job: Job, placement: Placement, config: PipelineConfig) -> None:
        """Stores which rank needs which part, and how batches are cut."""
        self._job, self._config = job, config
        self.first_owner = placement.rank_of(0)
        self.last_owner = placement.rank_of(placement.stages - 1)
        self.owns_first = self.plays(self.first_owner)
        self.owns_last = self.plays(self.last_owner)
        owns = self.owns_first, self.owns_last
        self._comparison = RowComparison(job, owns, self.first_owner)

    def plays(self, rank: int) -> bool:
        """Whether this process is that rank of the pipeline, or plays all ranks."""
        return self._job.local or rank == self._job.hcg.get_stage_id()

    def cut(self, any_rows: bool = False, keeps_graph: bool = False) -> MicroBatchCut:
        """Returns the sizes of micro-batches; with ``any_rows``, for any number of rows."""
        config = self._config
        return MicroBatchCut(config.micro_batches, config.micro_batch_size, any_rows, keeps_graph)

    def micro_batches(
        self, data: Nest, any_rows: bool = False, keeps_graph: bool = False
    ) -> MicroBatches:
        """Cuts a batch in any form that ``train_batch`` takes.

        Raises:
            ConfigError: The number of rows or items does not fit.
            BoundaryError: A value is not made of Tensors.
        """
        return split(data, self.cut(any_rows, keeps_graph))

    def require(self, batches: MicroBatches, labelled: bool) -> None:
        """Refuses a batch that lacks what this process's stages need.

        Raises:
            ConfigError: The batch has no inputs for the first stage, or no labels for the last.
        """
        if batches.inputs is None and self.owns_first:
            raise ConfigError(
                "this rank owns the first stage and was given no inputs",
                fix="give this rank the batch; None is for ranks without the first stage",
            )
        if labelled and batches.labels is None and self.owns_last:
            raise ConfigError(
                "this rank owns the last stage and was given no labels",
                fix="give this rank the batch too, [inputs, labels]; where loss_fn needs no "
                "labels, [inputs, [None] * accumulate_steps]",
            )

    def compare(self, batches: MicroBatches, count: int = 0, rate: float | None = None) -> int:
        """Makes sure that this replica's ranks have rows of one batch. Collective.

        Args:
            batches: The micro-batches of this rank.
            count: A number that the owner of the first stage sends to the other ranks.
            rate: The learning rate of the step that follows; None without one.

        Returns:
            The count on that owner.

        Raises:
            ConfigError: The ranks have different rows, or different learning rates.
        """
        compared = batches if self._config.compare_rows else None
        return self._comparison.compare(compared, count, rate)

    def share_batch(self, data: Nest) -> tuple[MicroBatches, MicroBatches]:
        """Sends every rank the inputs of the first stage and the labels of the last. Collective.

        Returns:
            The micro-batches of this replica, which can be passed as a batch, and those of all
            replicas, one replica after another.
        """
        return self.share(self.micro_batches(data))

    def share(self, batches: MicroBatches) -> tuple[MicroBatches, MicroBatches]:
        """Does the same as :meth:`share_batch`, for a batch that is cut already. Collective.

        Sequences that are split along sep and cp are whole in the result.
        """
        self._job.call("shares a batch with its reference")
        self.compare(batches)
        group = self._job.group()
        inputs = group.broadcast(batches.inputs, self.first_owner)
        labels = group.broadcast(batches.labels, self.last_owner)
        if self._job.sequence().ranks > 1:
            ranks = pkgutil.resolve_name("fleetpipe.contrib.sequences:sequence_ranks")()
            inputs, labels = ranks.whole_batch((inputs, labels))
        replicas = self._job.replicas().all_gather((inputs, labels))
        everyone = MicroBatches(
            [one for parts, _ in replicas for one in parts],
            [one for _, parts in replicas for one in parts],
        )
        return MicroBatches(inputs, labels), everyone

    def from_last_stage(self, value: Nest) -> list[Nest]:
        """Returns, on every rank, the values that the owners of the last stage pass. Collective.

        Args:
            value: Tensors and plain values in tuples, lists and dicts; other ranks may pass None.

        Returns:
            The values, replica by replica.

        Raises:
            BoundaryError: A value contains another kind of object.
            PipelineTimeout: Some rank did not come within the limit.
        """

        def share() -> list[Nest]:
            values = self._job.replicas().all_gather(value) if self.owns_last else None
            shared: list[Nest] = self._job.group().broadcast(values, self.last_owner)
            return shared

        everyone: list[Nest] = self._job.exchange("sharing what the last stage has", share)
        return everyone
