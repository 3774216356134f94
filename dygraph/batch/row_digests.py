"""Cuts, compares and exchanges the data of a batch on the ranks of a pipeline.

All ranks of one pipeline must train on one batch, so they compare digests (checksums) of their
rows. The rank that owns the first stage takes the inputs, the rank that owns the last stage the
labels. Start with :class:`RankData`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Nest
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.batch.micro_batches import MicroBatchCut, MicroBatches, split
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.errors import ConfigError
from fleetpipe.job import attempt_files
from fleetpipe.job.job import Job
from fleetpipe.mesh.axes import SEQUENCE
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Placement
from fleetpipe.transport.wire.bridge import checksum

_log = log.logger(__name__)

#: The number that ranks send in the place of a digest that is None.
_NO_DIGEST = -1

#: The remedy in errors of ranks with different rows.
_SAME_SAMPLES = (
    "have all ranks of a pipeline read the same samples in the same order: fleetpipe.io.DataLoader"
    "(dataset, batch_size, shuffle=..), or fleetpipe.io.DistributedBatchSampler in the place of "
    "Paddle's; seed alike what else draws them; pass None where a rank needs no inputs or labels"
)


class RowDigests(NamedTuple):
    """Checksums of a batch's inputs and labels; None for those that a rank does not have."""

    inputs: int | None
    labels: int | None


def digests_of(batches: MicroBatches) -> RowDigests:
    """Returns the digests of this rank's micro-batches."""
    return RowDigests(*map(_digest_of, batches))


def require_one_batch(here: RowDigests, first: RowDigests) -> None:
    """Refuses other rows on the rank of the last stage than on the rank of the first stage.

    Args:
        here: The digests of this rank, which owns the last stage.
        first: The digests of the rank that owns the first stage.
    """
    pairs = [pair for pair in zip(here, first) if None not in pair]
    equal = [digest == digest_of_first for digest, digest_of_first in pairs]
    if equal and not any(equal):
        raise ConfigError(
            "the ranks of one pipeline were given different rows",
            where="before the batch runs",
            expected="on the rank of the last stage the labels of the first stage's inputs",
            got="other inputs and other labels than on the rank of the first stage",
            cause="each rank shuffles by itself, reads a share of the dataset as of a replica, or "
            "has drawn other random numbers, say a layer from NumPy's or Python's generator",
            fix=_SAME_SAMPLES
            + '; fleetpipe_configs = {"compare_rows": False} leaves this check out',
        )


def require_different_parts(job: Job, inputs: int | None) -> None:
    """Refuses equal inputs on ranks that split sequences. Collective over sep and cp.

    Args:
        job: The job.
        inputs: The digest of this rank's inputs.
    """
    for group in map(job.along, SEQUENCE):
        # Some parts may be equal, such as parts that are all padding.
        if group.ranks > 1 and len({*group.all_gather(inputs)}) == 1:
            job.allow.refuse(
                "data",
                "equal_parts",
                "ranks along sep or cp were given the same inputs, and each is to have a part",
                got="equal inputs",
                cause="own_part was not called, so that each has whole sequences",
                fix="pass own_part(inputs) and own_part(labels), of fleetpipe.dygraph.sequences",
            )


def require_one_rate(job: Job, rates: Sequence[float]) -> None:
    """Refuses different learning rates; ``rates`` has one for each rank along mp or of replicas."""
    if len({*rates}) > 1:
        job.allow.refuse(
            "optimizer",
            "learning_rates",
            "the ranks step with different learning rates",
            got=" and ".join(map(str, dict.fromkeys(rates))),
            cause="a scheduler is stepped on some ranks alone, or by a loss that only one has",
            fix="step it on every rank alike, by the loss that train_batch returns on all of them",
        )


def _digest_of(values: Nest) -> int | None:
    """Returns a checksum of all tensors of a batch's inputs or labels; None without tensors."""
    tensors = [tensor for tensor in tensors_of(values) if 0 not in tensor.shape]
    return checksum(tensors) if tensors else None


class RankData:
    """Cuts, compares and exchanges the batches of a pipeline.

    Attributes:
        first_owner: The rank of the pipeline that owns the first stage and takes the inputs.
        last_owner: The rank of the pipeline that owns the last stage and takes the labels.
        owns_first: Whether this process is rank ``first_owner``, or plays all ranks.
        owns_last: Whether this process is rank ``last_owner``, or plays all ranks.
    """

    def __init__(self, job: Job, placement: Placement, config: PipelineConfig) -> None:
        """Determines the ranks that need inputs and labels.

        Args:
            job: The job of the pipeline.
            placement: The rank of each stage.
            config: The options of the pipeline, with the sizes of batches.
        """
        self._job, self._config = job, config
        self.first_owner = placement.rank_of(0)
        self.last_owner = placement.rank_of(placement.stages - 1)
        self.owns_first = self.plays(self.first_owner)
        self.owns_last = self.plays(self.last_owner)
        # A process that replaces a failed one begins after the first comparison of the others.
        self._first_compared = attempt_files.own_generation() > 0

    def plays(self, rank: int) -> bool:
        """Whether this process is rank ``rank`` of the pipeline, or plays all ranks."""
        return self._job.local or rank == self._job.hcg.get_stage_id()

    def cut(self, any_rows: bool = False, keeps_graph: bool = False) -> MicroBatchCut:
        """Returns the sizes of micro-batches by the options, as a cut with these arguments."""
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

        Args:
            batches: The micro-batches of this rank.
            labelled: Whether the last stage computes losses, and so needs labels.

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
        """Refuses rows of different batches on the ranks of a replica. Collective over the replica.

        Args:
            batches: The micro-batches of this rank.
            count: The number of micro-batches on this rank.
            rate: The learning rate of the step that follows; None without a step.

        Returns:
            ``count`` of the rank that owns the first stage.

        Raises:
            ConfigError: The ranks have different rows, or different learning rates.
        """
        compares = self._config.compare_rows
        here = digests_of(batches) if compares else RowDigests(None, None)
        # As two halves: assign would take a number of 64 bits for a float.
        halves = np.array([np.nan if rate is None else rate]).view("uint32")
        digests = [_NO_DIGEST if digest is None else digest for digest in here]
        message = np.array([count, *halves, *digests], "int64")
        # One message, for which the owner of the first stage does not wait. A tensor has the same
        # form whatever its numbers. By assign: to_tensor of Paddle 3.3.1 leaks a list.
        count, low, high, *first = (
            self._job.group().broadcast(paddle.assign(message), self.first_owner).tolist()
        )
        if rate is not None:
            rate_of_first = np.array([low, high], "uint32").view("float64").tolist()
            require_one_rate(self._job, [*rate_of_first, rate])
        if compares:
            if self.owns_last:
                digests_of_first = (None if digest == _NO_DIGEST else digest for digest in first)
                require_one_batch(here, RowDigests(*digests_of_first))
            owns = self.owns_first, self.owns_last
            self._require_equal_along_mp([d if owned else None for d, owned in zip(here, owns)])
            if self.owns_first and not self._first_compared:
                self._first_compared = True
                self._warn_of_equal_replicas(here.inputs)
                require_different_parts(self._job, here.inputs)
        return count

    def _require_equal_along_mp(self, needed: list[int | None]) -> None:
        """Refuses different rows on the ranks that hold shards of one stage. Collective over mp.

        Args:
            needed: The digests of the inputs and of the labels; None for what this rank does not
                use.
        """
        group = self._job.model_parallel()
        if group.ranks > 1 and len({*map(tuple, group.all_gather(needed))}) > 1:
            raise ConfigError(
                "the ranks that hold shards of one stage were given different rows",
                where="before the batch runs",
                expected="the same rows on all ranks along mp",
                fix=_SAME_SAMPLES,
            )

    def _warn_of_equal_replicas(self, inputs: int | None) -> None:
        """Warns if replicas have the same inputs, by their digest. Collective over the replicas."""
        everyone = self._job.replicas().all_gather(inputs)
        if len({*everyone}) < len(everyone):
            log.once(
                _log.warning,
                f"of {len(everyone)} replicas some were given the same rows in their first batch: "
                "they train on less data than they could. fleetpipe.io.DataLoader and "
                "DistributedBatchSampler give each replica rows of its own",
            )

    def share_batch(self, data: Nest) -> tuple[MicroBatches, MicroBatches]:
        """Gives every rank the inputs and the labels of a batch. Collective over the job.

        Args:
            data: The batch, as this rank would pass it to ``train_batch``.

        Returns:
            The micro-batches of this replica, which can be passed as a batch, and those of all
            replicas, one replica after another.
        """
        return self.share(self.micro_batches(data))

    def share(self, batches: MicroBatches) -> tuple[MicroBatches, MicroBatches]:
        """Shares a batch that is cut already, like :meth:`share_batch`. Collective over the job.

        Sequences that ranks along sep and cp have split are joined in the result.
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
        of_all_replicas = MicroBatches(
            [value for inputs_of_one, _ in replicas for value in inputs_of_one],
            [value for _, labels_of_one in replicas for value in labels_of_one],
        )
        return MicroBatches(inputs, labels), of_all_replicas

    def from_last_stage(self, value: Nest) -> list[Nest]:
        """Returns on every rank what the owners of the last stage pass. Collective over the job.

        Args:
            value: Tensors and plain values in tuples, lists and dicts; other ranks may pass None.

        Returns:
            The values, replica by replica.

        Raises:
            BoundaryError: A value contains another kind of object.
            PipelineTimeout: Some rank did not come within the limit.
        """

        def share() -> Nest:
            values = self._job.replicas().all_gather(value) if self.owns_last else None
            return self._job.group().broadcast(values, self.last_owner)

        everyone: list[Nest] = self._job.exchange("sharing what the last stage has", share)
        return everyone
