"""Distributes samples to replicas; all ranks of a replica get the same: see the batch sampler.

An epoch has one order, which depends on seed and epoch only. It is read in global batches, one for
each step of the job, and a global batch is cut into one part for each replica. So the position of a
run is one number, that of the samples that all replicas together have taken, and does not depend on
the number of replicas::

    order of epoch 3   | 7 2 | 9 4 | 0 5 | 8 1 | 3 6 |
    2 replicas of 2    |  0     1  |  0     1  |           consumed: 8
    then 1 of 4                                |  0  |     goes on at 8
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetpipe.errors import ConfigError, StateError, require_whole
from fleetpipe.io.position import checked_fields, foreign_position_error, require_same_data
from fleetpipe.job import meeting
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows

_FIELDS = {"seed": int, "epoch": int, "consumed": int, "samples": int, "shuffle": bool}
_Order = range | np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class _Position:
    """A position in the data of the job.

    Attributes:
        epoch: The number of the epoch.
        consumed: The number of the epoch's samples that all replicas together have received or
            dropped.
    """

    epoch: int
    consumed: int = 0


@shows("batch_size", "shuffle", "seed", replica="local_rank", replicas="nranks")
class DistributedBatchSampler(paddle.io.DistributedBatchSampler):
    """Paddle's sampler, split by data-parallel replica and not by the rank in the world.

    All ranks of one pipeline see the same batches in the same order, and different replicas see
    different samples. Each iteration is the next epoch, unless :meth:`set_epoch` chooses one; with
    ``shuffle=True`` each epoch has its own order. Create it with the same arguments on every rank.

    If the number of samples is a multiple of the number of replicas, the order is Paddle's.
    Otherwise Paddle repeats samples before it shuffles, so that its order depends on the replicas.

    Attributes:
        read_ahead: Whether a loader draws batches before the training takes them.
    """

    read_ahead = False

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = True,
        *,
        seed: int = 0,
    ) -> None:
        """Creates the sampler of this rank's replica.

        Args:
            dataset: Any dataset with a length.
            batch_size: Rows of a batch of one replica: accumulate_steps x micro_batch_size.
            num_replicas: Number of replicas; by default that of the job, dp x sharding.
            rank: Number of the replica; by default this process's.
            shuffle: Whether to shuffle, in an order that depends on seed and epoch only.
            drop_last: Whether to drop the samples at the end of an epoch that do not fill a batch
                on all replicas. If False, they are distributed evenly, filled up with samples from
                the epoch's begin.
            seed: The seed of the order; 0 gives Paddle's order.

        Raises:
            ConfigError: An argument is not a valid number, or ``rank`` is not below
                ``num_replicas``.
            StateError: ``fleet.init`` was not called before, in a process that is one of several.
        """
        if num_replicas is None or rank is None:
            replicas, replica = replicas_and_replica()
            num_replicas = replicas if num_replicas is None else num_replicas
            rank = replica if rank is None else rank
        replicas = require_whole("num_replicas", num_replicas)
        self.seed = require_whole("seed", seed, 0)
        # Paddle's constructor sets the epoch.
        self._position = _Position(0)
        self._begun = False
        super().__init__(
            dataset,
            require_whole("batch_size", batch_size),
            num_replicas=replicas,
            rank=require_whole("rank", rank, 0),
            shuffle=shuffle,
            drop_last=drop_last,
        )
        if self.local_rank >= replicas:
            raise ConfigError(
                f"rank (={rank}) must be below num_replicas (={replicas})",
                fix="leave both out: the job knows its replicas",
            )

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or comes next."""
        return self._position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next iteration reads, from its begin or a restored position.

        Args:
            epoch: The number of the epoch, from 0.

        Raises:
            ConfigError: ``epoch`` is no whole number from 0.
        """
        if self._begun or require_whole("epoch", epoch, 0) != self.epoch:
            self._position = _Position(require_whole("epoch", epoch, 0))
            self._begun = False

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the indices of each batch of this replica until the epoch ends."""
        if self._begun:
            self.set_epoch(self.epoch + 1)
        self._begun = True
        return self._batches(self._position)

    def __len__(self) -> int:
        """The number of batches of a whole epoch, the same for all replicas."""
        global_batch = self.batch_size * self.nranks
        return (len(self.dataset) + (0 if self.drop_last else global_batch - 1)) // global_batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the job in its data, the same on all ranks, as JSON values.

        A batch counts from the moment it is handed out; if a loader draws batches ahead, ask the
        :class:`~fleetpipe.io.DataLoader`.

        Returns:
            ``seed``, ``epoch``, ``shuffle``, ``samples`` (of an epoch), and ``consumed``: how many
            of the samples all replicas together have received or dropped.
        """
        return {
            "seed": self.seed,
            "epoch": self._position.epoch,
            "consumed": self._position.consumed,
            "samples": len(self.dataset),
            "shuffle": self.shuffle,
        }

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position, to the end of its epoch.

        The position may have been saved with other replicas and another batch size: the remaining
        samples come in the same order. The saved seed is used.

        Args:
            state: A result of :meth:`state_dict`.

        Raises:
            CheckpointError: ``state`` is not the state of a sampler, or was saved for other data;
                nothing has changed.
        """
        owner = "DistributedBatchSampler"
        saved = checked_fields(state, _FIELDS, owner)
        fix = "make it with the dataset and the arguments of the run that saved, or begin anew"
        require_same_data("samples", len(self.dataset), saved["samples"], owner, fix)
        require_same_data("shuffle", self.shuffle, saved["shuffle"], owner, fix)
        if saved["consumed"] > saved["samples"]:
            raise foreign_position_error(
                owner, f"at most {saved['samples']} consumed", f"{saved['consumed']}"
            )
        self.seed = saved["seed"]
        self._position = _Position(saved["epoch"], saved["consumed"])
        self._begun = False

    def _batches(self, position: _Position) -> Iterator[list[int]]:
        """Yields the indices of this replica's batches, and moves ``position`` with each."""
        order = self._order(position.epoch)
        global_batch = self.batch_size * self.nranks
        # The caller's module is the only sign that Paddle's own loader reads this sampler.
        reader = sys._getframe(1).f_globals.get("__name__", "")
        self.read_ahead |= reader.startswith("paddle.io.")
        while position.consumed < len(order):
            begin, end = position.consumed, position.consumed + global_batch
            is_last = len(order) - end < (global_batch if self.drop_last else 1)
            # Counted before it is yielded: the code that saves then has the batch.
            position.consumed = len(order) if is_last else end
            if end <= len(order):
                yield self._own_indices(order[begin:end])
            elif not self.drop_last:
                # Filled up with the first samples to equal parts.
                missing = -(len(order) - begin) % self.nranks
                yield self._own_indices([*order[begin:], *np.resize(order, missing)])

    def _order(self, epoch: int) -> _Order:
        """Returns the indices of all samples in the order of an epoch, the same on all ranks."""
        samples = len(self.dataset)
        if not self.shuffle:
            return range(samples)
        # Seed 0 is Paddle's order, which knows no seeds.
        random = np.random.RandomState([self.seed, epoch] if self.seed else epoch)
        return random.permutation(samples)

    def _own_indices(self, global_batch: Sequence[int] | _Order) -> list[int]:
        """Returns this replica's part of the indices of a global batch."""
        size = len(global_batch) // self.nranks
        return [int(index) for index in global_batch[self.local_rank * size :][:size]]


def replicas_and_replica() -> tuple[int, int]:
    """Returns the number of replicas of the job, and the number of this process's replica.

    Raises:
        StateError: ``fleet.init`` was not called before, in a process that is one of several.
    """
    job = current_job()
    if job is not None:
        return job.degrees.replicas, job.replica
    if meeting.world_size() == 1:
        return 1, 0
    raise StateError(
        "the sampler needs to know its replica",
        fix="call fleet.init(is_collective=True, strategy=strategy) first, or say num_replicas and "
        "rank",
    )
