"""The part of a rank in healing: it repeats the step in which another died, and keeps all else."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fleetpipe import log, systems
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.contrib.healing.joining import connect_again, require_going_on
from fleetpipe.contrib.kept_state.kept_state import KeptState, newest_of_all
from fleetpipe.errors import CheckpointError, FleetPipeError, PeerFailed, PipelineTimeout
from fleetpipe.job import attempt_files, generation
from fleetpipe.job.generation import Generation
from fleetpipe.job.job import Job

_log = log.logger(__name__)
_LOOK_SECONDS = 0.01
#: Seconds in which the launcher notices that a process has ended.
_CHANGE_SECONDS = 2.0


class Running(Protocol):
    """The run that heals.

    Attributes:
        step: How many steps are done.
    """

    step: int

    def meet_anew(self) -> None:
        """Begins what the ranks exchange from step to step anew."""

    def agree_once_more(self) -> None:
        """Exchanges what the ranks exchange after a step; waits for none."""


class Healing:
    """Makes good the death of a rank where all others can go on from the same step."""

    def __init__(self, job: Job, run: Running, kept: KeptState, home: Path) -> None:
        """Prepares to heal.

        Args:
            job: The job.
            run: Its run, whose steps are kept.
            kept: The states after its last steps.
            home: The folder of the attempt.
        """
        self._job, self._run, self._kept, self._home = job, run, kept, home
        self._number = 0
        #: The generation in which the process began that serves the job's store; this one, if new.
        self._served_by = generation.current().since.get(0, 0) if job.alone else 0
        self._last: _Batch | None = None
        job.be_patient()

    def train(
        self,
        step: Callable[[Any], Any],
        data: Any,
        scaler: Any,
        prepare: Callable[[], None],
    ) -> Any:
        """Returns ``step(data)``; after the death of a rank the step runs again. Collective.

        A step counts once every rank has done it: until then each can go back.

        Args:
            step: Trains on a batch.
            data: The batch, or an iterator.
            scaler: The ``GradScaler`` that the step updates, or None.
            prepare: What a rank does before its first step, and a replacement before it meets the
                others.

        Raises:
            PeerFailed: A rank died, and the job cannot heal.
            PipelineTimeout: A wait has ended, and no rank is silent.
        """
        data = Taken(data) if hasattr(type(data), "__next__") else data
        scale = None if scaler is None else scaler.state_dict()
        batch = _Batch(step, data, self._kept.collect(), scaler, scale)
        if self._job.alone:
            prepare()
            self._meet()
        while True:
            try:
                result = self._run_once(batch)
            except (PeerFailed, PipelineTimeout) as error:
                if self.heal(error):
                    # As the process does that has done the step before for the first time.
                    self._run.agree_once_more()
                self._go_back(batch)
            else:
                self._last = batch
                return result

    def _run_once(self, batch: _Batch) -> Any:
        result = batch.step(batch.data)
        with self._job.guarded(lambda: "ending the step on all ranks"):
            self._job.everyone().all_gather(None)
        return result

    def _go_back(self, batch: _Batch) -> None:
        """Restores all that is kept, to the values before a batch."""
        self._kept.put_tensors_back(self._run.step)
        self._kept.put_back(batch.before)
        if batch.scaler is not None:
            batch.scaler.load_state_dict(batch.scale)
        if isinstance(batch.data, Taken):
            batch.data.begin_anew()

    def heal(self, error: PeerFailed | PipelineTimeout) -> bool:
        """Waits for the process that replaces a rank, and connects with it. Collective.

        Where a wait has ended, ranks that say nothing are killed first.

        Where a rank had not kept the step that this one has, this one does it once more with it.

        Returns:
            Whether it did.

        Raises:
            FleetPipeError: ``error``, if the job cannot heal.
        """
        since, failure, before = time.monotonic(), self._job.failure, self._number
        silent = self._job.silent_ranks()
        late = failure is not None and failure.what == "timed out" and silent
        if failure is None or not (late or failure.what in ("died", "raised")):
            raise error
        gone = f"rank {failure.rank} {failure.what}"
        if late:
            gone = f"rank {silent[0]} was silent"
            self._kill(silent)
        now = None
        while now is None:
            try:
                self._await_generation()
                now, step = self._meet()
            except (PeerFailed, PipelineTimeout) as obstacle:
                self._tell_unhealed(str(obstacle).splitlines()[0])
                raise error from obstacle
            if step < self._run.step and not self._repeats():
                now = None
        ranks = range(self._job.degrees.size)
        stayed = [rank for rank in ranks if now.since.get(rank, 0) <= before]
        if attempt_files.own_rank() == stayed[0]:
            seconds = time.monotonic() - since
            place = f"{gone}, another process has its place"
            _log.info(f"{place}: the job goes on after {step} steps ({seconds:.1f} s)")
        return step < self._run.step

    def _kill(self, ranks: list[int]) -> None:
        processes = dict(attempt_files.started_ranks(self._home))
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):  # another rank has done it
                os.kill(processes[rank], systems.SIGKILL)

    def _repeats(self) -> bool:
        """Does the last step once more, and then has what it had before. Collective.

        Returns:
            Whether no rank has died meanwhile.
        """
        if self._last is None:
            raise PeerFailed("a rank died between its last step and what it keeps of that")
        after, last = self._kept.collect(), self._last
        scale = None if last.scaler is None else last.scaler.state_dict()
        self._run.step -= 1
        try:
            self._go_back(last)
            self._run_once(last)
            return True
        except (PeerFailed, PipelineTimeout):
            return False
        finally:
            self._run.step += 1
            self._kept.put_tensors_back(self._run.step)
            self._kept.put_back(after)
            if last.scaler is not None:
                last.scaler.load_state_dict(scale)

    def _await_generation(self) -> None:
        deadline = time.monotonic() + self._job.timeout
        while (now := generation.current()).number == self._number:
            require_going_on(now)
            if time.monotonic() > deadline:
                raise PipelineTimeout("the launcher replaced no process within the limit")
            time.sleep(_LOOK_SECONDS)

    def _meet(self) -> tuple[Generation, int]:
        """Connects all ranks, once more where another one dies meanwhile. Collective.

        Returns:
            The generation that is connected, and the least number of steps that a rank has done.
        """
        while True:
            now = generation.current()
            require_going_on(now)
            rank, step = attempt_files.own_rank(), self._run.step
            generation.note_place(self._home, rank, now.number, step)
            served_by = now.since.get(0, 0)
            try:
                connect_again(self._job, now, served_by != self._served_by)
                self._run.meet_anew()
                least = min(self._job.everyone().all_gather(step))
            except FleetPipeError:
                # The death of a rank is known to its neighbours before the launcher sees it.
                if not _changes(now.number):
                    raise
            else:
                self._number, self._served_by = now.number, served_by
                (self._home / f"failure.{rank}").unlink(missing_ok=True)
                return now, least

    def _tell_unhealed(self, why: str) -> None:
        file = self._home / f"unhealed.{attempt_files.own_rank()}"
        file.write_text(why, encoding="utf-8")


def restore(kept: KeptState, job: Job, home: Path, manager: CheckpointManager) -> int:
    """Restores a process that replaces a rank to the step of the others; returns that step.

    Raises:
        CheckpointError: The others are at different steps, or at one that this rank had not kept;
            or the save of that step did not end.
        PipelineTimeout: Some rank has not said within the limit at which step it is.
    """
    deadline = time.monotonic() + job.timeout
    while True:
        now = generation.current()
        require_going_on(now)
        awaited = {rank for rank in range(job.degrees.size) if now.since.get(rank) != now.number}
        awaited.discard(attempt_files.own_rank())
        places = generation.places(home, now.number)
        if awaited <= places.keys():
            break
        if time.monotonic() > deadline:
            raise PipelineTimeout(f"ranks {sorted(awaited - places.keys())} did not come to heal")
        time.sleep(_LOOK_SECONDS)
    step, why = newest_of_all(kept.folder, job.degrees.size), ""
    if step is None or not {step, step + 1}.issuperset(places.values()):
        why = f"ranks are at other steps than {step}, the newest that all have kept"
    elif max(manager.steps(), default=0) < manager.newest_due(step):
        why = f"step {manager.newest_due(step)} is not saved"
    if step is None or why:
        (home / f"unhealed.{attempt_files.own_rank()}").write_text(why, encoding="utf-8")
        raise CheckpointError(why, got=str(places))
    kept.restore(step)
    kept.forget_after(step)
    _log.info(f"this process has the place of rank {attempt_files.own_rank()} after {step} steps")
    return step


def _changes(number: int) -> bool:
    """Waits a moment for the end of a generation; returns whether it has ended."""
    deadline = time.monotonic() + _CHANGE_SECONDS
    while generation.current().number == number and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return generation.current().number != number


class _Batch(NamedTuple):
    """A training batch that can run again.

    Attributes:
        step: Trains on the data.
        data: The batch, or a :class:`Taken`.
        before: Random states, learning rate and the like before it.
        scaler: The ``GradScaler`` that it updates, or None.
        scale: The scaler's state before it.
    """

    step: Callable[[Any], Any]
    data: Any
    before: Any
    scaler: Any
    scale: Any


class Taken:
    """An iterator whose items can be taken once more."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._taken: list[Any] = []
        self._next = 0

    def __iter__(self) -> Taken:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._taken):
            self._taken.append(next(self._items))
        self._next += 1
        return self._taken[self._next - 1]

    def begin_anew(self) -> None:
        """Makes the next item the first one that was taken."""
        self._next = 0
