"""Lets the ranks of a job save and restore together: if one fails, all raise; see ``Ranks``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple, TypeVar, cast

import numpy as np

from fleetpipe.aliases import Tensor
from fleetpipe.errors import CheckpointError, ConfigError, FleetPipeError, StateError
from fleetpipe.job import meeting
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.axes import AXES, COPIES
from fleetpipe.mesh.groups import DirectGroup, Group, SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.transport import MessageKey, Transport

Result = TypeVar("Result")
#: The key of the messages by which ranks send parts of a checkpoint to rank 0.
_PART = MessageKey("H", 0, 0, "part of a checkpoint", 0)


class Part(NamedTuple):
    """One coordinate of a rank: the number of its shard, replica or group of stages.

    Attributes:
        number: The number, from 0.
        total: How many shards, replicas or groups of stages there are.
    """

    number: int = 0
    total: int = 1


class RankCoordinates(NamedTuple):
    """The coordinates of a rank: which part of the model and of the data it has.

    ``state.json`` stores the coordinates of each rank that saved. In a job with other degrees, a
    rank restores the state of the saved rank with the most equal coordinates; earlier fields weigh
    more.

    Attributes:
        shard: The rank's tensor-parallel shard.
        replica: Its copy of the parameters: along dp, sharding, sep and cp.
        stages: Its rank in the pipeline, which decides the stages that it has.
    """

    shard: Part = Part()
    replica: Part = Part()
    stages: Part = Part()

    @classmethod
    def from_json(cls, parts: Iterable[Sequence[int]]) -> RankCoordinates:
        """Returns the coordinates from the lists of :meth:`to_json`."""
        return cls(*(Part(*part) for part in parts))

    def to_json(self) -> list[list[int]]:
        """Returns the coordinates as lists ``[number, total]``."""
        return [[*part] for part in self]


class Ranks:
    """The ranks of a job, of which this process is one.

    Args:
        group: The group of all ranks.
        job: The job; None for a single process, and in tests.

    Attributes:
        job: The job; None for a single process, and in tests.
        rank: The number of this rank in the job.
        count: The number of ranks.
    """

    def __init__(self, group: Group, job: Job | None = None) -> None:
        self._group = group
        self.job = job
        self.rank = group.rank
        self.count = group.ranks

    @classmethod
    def of_job(cls) -> Ranks:
        """Returns the ranks of the current job; this process alone outside of one.

        Raises:
            StateError: Several processes were launched, and there is no job yet.
        """
        job = current_job()
        if job is None and meeting.world_size() > 1:
            raise StateError(
                "the ranks that save and restore together do not know each other yet",
                got=f"{meeting.world_size()} processes, and no fleet.init",
                fix="call fleet.init(is_collective=True, strategy=strategy) first",
            )
        return cls(SoleGroup()) if job is None else cls(job.everyone(), job)

    @property
    def layout(self) -> dict[str, int]:
        """The number of ranks along each axis of the mesh."""
        degrees = None if self.job is None else self.job.degrees
        return {axis: 1 if degrees is None else degrees.split(axis) for axis in AXES}

    @property
    def shrinkable_axes(self) -> tuple[str, ...]:
        """The axes along which the job may restart with fewer ranks, the first to shrink first."""
        return ("dp", "pp") if self.job is not None and self.job.degrees.dp_open else ("pp",)

    @property
    def coordinates(self) -> RankCoordinates:
        """The coordinates of this rank in the job, by shard, replica and stages.

        The only process of a job, or a process without a job, has number 0 of 1 in each.
        """
        job = self.job
        if job is None or job.local:
            return RankCoordinates()
        at, degrees = job.coordinate, job.degrees
        return RankCoordinates(
            shard=Part(*job.shard),
            replica=Part(job.copy, degrees.split(*COPIES)),
            stages=Part(at.pp, degrees.pp),
        )

    def together(self, activity: str, act: Callable[[], Result]) -> list[Result]:
        """Calls ``act`` on every rank, and returns the results of all, by rank. Collective.

        Args:
            activity: A phrase for messages that says what the ranks do, such as ``saving step 3``.
            act: What this rank does. It returns a text, a number, None, or lists and dicts of
                these, which all ranks get.

        Raises:
            CheckpointError: ``act`` failed on a rank; every rank raises the same.
            ConfigError: ``act`` raised it on every rank, because of the script.
            PeerFailed: A rank died.
            PipelineTimeout: A rank did not arrive within the limit.
        """
        if self.job is not None and self.job is not current_job():
            return [act()]  # the job has ended: each rank acts for itself
        if self.job is not None and self.job.healing is not None:
            self.job.healing.forbid_healing("the script saves or restores within its step")
        guard = nullcontext() if self.job is None else self.job.guarded(lambda: activity)
        if self.job is not None:
            # Ranks compare the first word alone: paths in the rest may differ between them.
            self.job.call(f"is {activity}", kind=activity.partition(" ")[0])
        value: Result | None = None
        cause: Exception | None = None
        with guard:
            try:
                value = act()
            except (FleetPipeError, OSError, EOFError) as error:
                cause = error
            failure = None if cause is None else str(cause)
            answers = self._group.all_gather((failure, value))
        try:
            self._raise_first([failure for failure, _ in answers], activity, cause)
        finally:
            del cause  # its traceback has this frame, and so what `act` refers to
        return [value for _, value in answers]

    def send_parts(self, parts: Iterable[memoryview]) -> None:
        """Sends parts of a checkpoint, one by one, to rank 0, which calls :meth:`receive_part`.

        Raises:
            PeerFailed: Rank 0 died.
            PipelineTimeout: Rank 0 did not receive a part within the time limit.
        """
        transport, limit = self._direct
        for part in parts:
            sent = paddle.to_tensor(np.frombuffer(part, np.uint8), place=paddle.CPUPlace())
            transport.send(0, _PART, sent)
            transport.flush(limit)

    def receive_part(self, rank: int) -> Tensor:
        """Receives the next part that ``rank`` sends by :meth:`send_parts`, as a tensor of bytes.

        Raises:
            PeerFailed: The rank died.
            PipelineTimeout: The rank did not send a part within the time limit.
        """
        transport, limit = self._direct
        return transport.receive(rank, _PART, limit)

    @property
    def _direct(self) -> tuple[Transport, float]:
        """The transport to the other ranks, and the time limit of waits in seconds."""
        return cast(DirectGroup, self._group).transport, cast(Job, self.job).timeout

    def _raise_first(
        self, failures: list[str | None], activity: str, cause: Exception | None
    ) -> None:
        """Raises the error of the first rank that failed, if one did.

        Args:
            failures: The text of each rank's error; None for a rank that succeeded.
            activity: A phrase that says what failed, such as ``saving step 3``.
            cause: This rank's own error; None if it succeeded.

        Raises:
            CheckpointError: A rank failed.
            ConfigError: Every rank failed, because of the script.
        """
        texts = {rank: text for rank, text in enumerate(failures) if text is not None}
        if not texts:
            return
        rank, text = next(iter(texts.items()))
        if isinstance(cause, CheckpointError) and len(failures) == 1:
            raise cause  # there is no other rank to name
        if isinstance(cause, ConfigError) and len(texts) == len(failures):
            raise cause  # an error of the script, on every rank alike
        failed = [other for other in texts if other != rank]
        also = f" (and ranks {failed})" if failed else ""
        raise CheckpointError(
            f"{activity} failed on rank {rank} of the job{also}: {text.splitlines()[0]}",
            cause="\n    ".join(text.splitlines()[1:]) or None,
            fix="mend what is said of that rank; no rank has changed anything",
        ) from cause
