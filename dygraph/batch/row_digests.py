"""Compares digests of the rows on each rank: all ranks of one pipeline must train on one batch.

The first stage takes its rank's inputs, the last one its rank's labels. If both ranks have inputs
and labels, it is enough that either are equal. Then one rank's batch is trained: the other may, for
example, have augmented the same samples by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe import log
from fleetpipe.aliases import Nest
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.errors import ConfigError
from fleetpipe.job import generation
from fleetpipe.job.job import Job
from fleetpipe.mesh.axes import SEQUENCE
from fleetpipe.paddle_api import paddle
from fleetpipe.transport.wire.bridge import checksum

_log = log.logger(__name__)

#: Stands for a digest that there is not.
_NONE = -1

_FIX = (
    "have all ranks of a pipeline read the same samples in the same order: fleetpipe.io.DataLoader"
    "(dataset, batch_size, shuffle=..), or fleetpipe.io.DistributedBatchSampler in the place of "
    "Paddle's; seed alike what else draws them; pass None where a rank needs no inputs or labels"
)


class RowDigests(NamedTuple):
    """Digests of a batch's inputs and labels; None for those that a rank does not have."""

    inputs: int | None
    labels: int | None


def digests_of(batches: MicroBatches) -> RowDigests:
    """Returns the digests of this rank's micro-batches."""
    return RowDigests(*map(_digest, batches))


def require_one_batch(here: RowDigests, first: RowDigests) -> None:
    """Makes sure, on the last stage's owner, that its labels belong to the inputs in use.

    Args:
        here: The digests of this rank's rows.
        first: The digests of the rows on the owner of the first stage.
    """
    both = [one == other for one, other in zip(here, first) if one is not None is not other]
    if both and not any(both):
        raise ConfigError(
            "the ranks of one pipeline were given different rows",
            where="before the batch runs",
            expected="on the rank of the last stage the labels of the first stage's inputs",
            got="other inputs and other labels than on the rank of the first stage",
            cause="each rank shuffles by itself, reads a share of the dataset as of a replica, or "
            "has drawn other random numbers, say a layer from NumPy's or Python's generator",
            fix=f'{_FIX}; fleetpipe_configs = {{"compare_rows": False}} leaves this check out',
        )


class RowComparison:
    """Compares the rows on the ranks of a replica, batch by batch.

    Attributes:
        owns: Whether this process owns the first stage, and the last one.
        source: The rank in the pipeline of the first stage's owner.
    """

    def __init__(self, job: Job, owns: tuple[bool, bool], source: int) -> None:
        self._job, self.owns, self.source = job, owns, source
        # A process that replaces one of the job's begins where the others have done that.
        self._first_compared = generation.began() > 0

    def compare(self, batches: MicroBatches | None, count: int, rate: float | None) -> int:
        """Does what :meth:`RankData.compare` does; without batches it compares no rows."""
        here = RowDigests(None, None) if batches is None else digests_of(batches)
        # In halves: assign takes numbers of 64 bits for floats.
        halves = np.array([np.nan if rate is None else rate]).view("uint32")
        row = np.array([count, *halves, *(_NONE if one is None else one for one in here)], "int64")
        # One message, which the owner of the first stage does not wait for. A tensor: other numbers
        # are no other form of it. And by assign: to_tensor of 3.3.1 leaves a list behind.
        count, low, high, *first = (
            self._job.group().broadcast(paddle.assign(row), self.source).tolist()
        )
        if rate is not None:
            require_one_rate(
                self._job, [*np.array([low, high], "uint32").view("float64").tolist(), rate]
            )
        if batches is not None:
            if self.owns[1]:
                require_one_batch(
                    here, RowDigests(*(None if one == _NONE else one for one in first))
                )
            needed = [one if needs else None for one, needs in zip(here, self.owns)]
            self._require_alike_along_mp(needed)
            if self.owns[0] and not self._first_compared:
                self._first_compared = True
                self._tell_of_same_replicas(here)
                self._require_parts_of_sequences(here)
        return count

    def _require_alike_along_mp(self, needed: list[int | None]) -> None:
        group = self._job.model_parallel()
        if group.ranks > 1 and len({*map(tuple, group.all_gather(needed))}) > 1:
            raise ConfigError(
                "the ranks that hold shards of one stage were given different rows",
                where="before the batch runs",
                expected="the same rows on all ranks along mp",
                fix=_FIX,
            )

    def _require_parts_of_sequences(self, here: RowDigests) -> None:
        for group in map(self._job.along, SEQUENCE):
            # A part may equal another one, as where both are padding.
            if group.ranks > 1 and len({*group.all_gather(here.inputs)}) == 1:
                self._job.allow.refuse(
                    "data",
                    "equal_parts",
                    "ranks along sep or cp were given the same inputs, and each is to have a part",
                    got="equal inputs",
                    cause="own_part was not called, so that each has whole sequences",
                    fix="pass own_part(inputs) and own_part(labels), of "
                    "fleetpipe.dygraph.sequences",
                )

    def _tell_of_same_replicas(self, here: RowDigests) -> None:
        everyone = self._job.replicas().all_gather(here.inputs)
        if len({*everyone}) < len(everyone):
            log.once(
                _log.warning,
                f"of {len(everyone)} replicas some were given the same rows in their first batch: "
                "they train on less data than they could. fleetpipe.io.DataLoader and "
                "DistributedBatchSampler give each replica rows of its own",
            )


def require_one_rate(job: Job, rates: Sequence[float]) -> None:
    """Refuses ranks that would step with different learning rates."""
    if len({*rates}) > 1:
        job.allow.refuse(
            "optimizer",
            "learning_rates",
            "the ranks step with different learning rates",
            got=" and ".join(map(str, dict.fromkeys(rates))),
            cause="a scheduler is stepped on some ranks alone, or by a loss that only one has",
            fix="step it on every rank alike, by the loss that train_batch returns on all of them",
        )


def _digest(part: Nest) -> int | None:
    """Returns a checksum of all tensors of a batch's inputs or labels; None if it has no tensor."""
    tensors = [tensor for tensor in tensors_of(part) if 0 not in tensor.shape]
    return checksum(tensors) if tensors else None
