"""The ranks of a job for saving and restoring: if one fails, all raise."""

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
_PART = MessageKey("H", 0, 0, "part of a checkpoint", 0)


class Part(NamedTuple):
    """The number of a part, and the number of all parts."""

    number: int = 0
    total: int = 1


class Place(NamedTuple):
    """The part of the model and of the data that a rank has, as ``state.json`` stores it.

    For a place that was not saved, the nearest saved one counts; earlier fields weigh more.
    """

    shard: Part = Part()
    replica: Part = Part()
    stages: Part = Part()

    @classmethod
    def from_json(cls, parts: Iterable[Sequence[int]]) -> Place:
        """Returns a place from the lists of :meth:`to_json`."""
        return cls(*(Part(*part) for part in parts))

    def to_json(self) -> list[list[int]]:
        """Returns the place as a list of lists."""
        return [[*part] for part in self]


class Ranks:
    """The ranks of a job, of which this process is one.

    Args:
        group: The group of all ranks.
        job: The job; None for a single process, and in tests.
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
    def axes_that_narrow(self) -> tuple[str, ...]:
        """The axes along which the script accepts fewer ranks, the first to shrink first."""
        return ("dp", "pp") if self.job is not None and self.job.degrees.dp_open else ("pp",)

    @property
    def place(self) -> Place:
        """The part of the model and of the data that this rank has."""
        job = self.job
        if job is None or job.local:
            return Place()
        at, degrees = job.coordinate, job.degrees
        return Place(
            shard=Part(*job.shard),
            replica=Part(job.copy, degrees.split(*COPIES)),
            stages=Part(at.pp, degrees.pp),
        )

    def together(self, what: str, act: Callable[[], Result]) -> list[Result]:
        """Calls ``act`` on every rank, and returns all results, by rank. Collective.

        Args:
            what: A phrase for messages, as ``saving step 3``.
            act: Returns texts, numbers, None, or lists and dicts of these.

        Raises:
            CheckpointError: ``act`` failed on a rank; every rank raises the same.
            ConfigError: ``act`` raised it on every rank, because of the script.
            PeerFailed: A rank died.
            PipelineTimeout: A rank did not arrive within the limit.
        """
        if self.job is not None and self.job is not current_job():
            return [act()]  # the job has ended: each rank acts for itself
        if self.job is not None and self.job.healing is not None:
            self.job.healing.hinder("the script saves or restores within its step")
        guard = nullcontext() if self.job is None else self.job.guarded(lambda: what)
        if self.job is not None:
            # Without the arguments, since paths may differ between ranks.
            self.job.call(f"is {what}", kind=what.partition(" ")[0])
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
            self._raise_first([failure for failure, _ in answers], what, cause)
        finally:
            del cause  # its traceback has this frame, and so what `act` refers to
        return [value for _, value in answers]

    def give(self, parts: Iterable[memoryview]) -> None:
        """Sends bytes to rank 0, one part after the other.

        Raises:
            PeerFailed: Rank 0 died.
            PipelineTimeout: It did not take a part within the limit.
        """
        transport, limit = self._direct
        for part in parts:
            sent = paddle.to_tensor(np.frombuffer(part, np.uint8), place=paddle.CPUPlace())
            transport.send(0, _PART, sent)
            transport.flush(limit)

    def take(self, rank: int) -> Tensor:
        """Returns the bytes of the next part from ``rank``, as a Tensor; raises as :meth:`give`."""
        transport, limit = self._direct
        return transport.receive(rank, _PART, limit)

    @property
    def _direct(self) -> tuple[Transport, float]:
        """The transport to the other ranks, and the time limit of waits."""
        return cast(DirectGroup, self._group).transport, cast(Job, self.job).timeout

    def _raise_first(self, failures: list[str | None], what: str, cause: Exception | None) -> None:
        """Raises the error of the first rank that failed; ``cause`` is this rank's own error."""
        texts = {rank: text for rank, text in enumerate(failures) if text is not None}
        if not texts:
            return
        rank, text = next(iter(texts.items()))
        if isinstance(cause, CheckpointError) and len(failures) == 1:
            raise cause
        if isinstance(cause, ConfigError) and len(texts) == len(failures):
            raise cause  # an error of the script, on every rank alike
        failed = [other for other in texts if other != rank]
        also = f" (and ranks {failed})" if failed else ""
        raise CheckpointError(
            f"{what} failed on rank {rank} of the job{also}: {text.splitlines()[0]}",
            cause="\n    ".join(text.splitlines()[1:]) or None,
            fix="mend what is said of that rank; no rank has changed anything",
        ) from cause
