"""The part of a rank in healing: it repeats the step in which another died, and keeps all else."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fleetpipe import log, systems
from fleetpipe.contrib.healing import records
from fleetpipe.contrib.healing.joining import connect_again, require_going_on
from fleetpipe.contrib.healing.taken import Taken
from fleetpipe.contrib.kept_state.kept_state import KeptState
from fleetpipe.errors import CheckpointError, FleetPipeError, PeerFailed, PipelineTimeout
from fleetpipe.job import attempt_files, generation
from fleetpipe.job.generation import Generation
from fleetpipe.job.job import Job
from fleetpipe.paddle_api.gloo.process_groups import has_gloo
from fleetpipe.paddle_api.topology import meets_by_host

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

    def __init__(self, job: Job, run: Running, kept: KeptState, home: Path, model: Any) -> None:
        """Prepares to heal.

        Args:
            job: The job.
            run: Its run, whose steps are kept.
            kept: The states after its last steps.
            home: The folder of the attempt.
            model: The model that is kept.
        """
        self._job, self._run, self._kept, self._home, self._model = job, run, kept, home, model
        self._number = 0
        #: The generation in which the process began that serves the job's store; this one, if new.
        self._served_by = generation.current().since.get(0, 0) if job.alone else 0
        self._last: _Batch | None = None
        self._obstacle = kept.obstacle()
        if job.healing is not None:
            # A process that replaces a rank would begin with the first of them.
            self._tell_unhealed("the script has begun a second training")
        elif not (meets_by_host() and has_gloo()):
            # Told before a rank dies: what connects such groups cannot be made anew.
            self._tell_unhealed("the ranks' groups are not Gloo's")
        #: What the processes before had of their last batches, of one that replaces a rank.
        self._earlier = records.read(home) if job.alone else {}
        job.be_patient()

    def refuse(self, why: str) -> None:
        """Refuses to heal from now on; the first reason counts."""
        self._obstacle = self._obstacle or why

    def follow(self, model: Any, scaler: Any, guards: int, drawn: bool) -> None:
        """Refuses to heal where a batch has what cannot be done once more; see ``Recovery``."""
        if model is not self._model:
            self.refuse("another model trains than the one that is kept")
        if self._last is not None and self._last.step == self._run.step:
            self.refuse("a step of the run has several batches")
        if scaler is not None and scaler.is_enable():
            self.refuse("a GradScaler scales the loss")
        if guards:
            self.refuse("guards compare the ranks every few batches")
        if drawn:
            self.refuse("a batch comes from a function")

    def train(self, begin: Callable[[Any], Any], data: Any, optimizer: Any) -> Any:
        """Trains ``begin(data)`` and returns it; trains again after the death of a rank.

        Collective. A step counts once every rank has done it: until then each can go back.

        Args:
            begin: Returns a ``TrainingBatch`` of the data.
            data: The batch, or an iterator.
            optimizer: The optimizer to step.

        Raises:
            CheckpointError: This process replaces a rank that had another batch.
            PeerFailed: A rank died, and the job cannot heal.
            PipelineTimeout: A wait has ended, and no rank is silent.
        """
        data = Taken(data) if hasattr(type(data), "__next__") else data
        batch = _Batch(self._run.step, begin, data, optimizer, self._kept.collect())
        begun = begin(data)
        record = records.record_of(begun, batch.before, self._kept.generators)
        records.write(self._home, batch.step, record)
        if self._job.alone:
            self._require_batch_of_rank(batch.step, record)
            self._meet()
        while True:
            try:
                self._run_once(begun, optimizer)
            except (PeerFailed, PipelineTimeout) as error:
                if self.heal(error):
                    # As the process does that has done the step before for the first time.
                    self._run.agree_once_more()
                self._go_back(batch)
                begun = begin(data)
            else:
                self._last = batch
                return begun

    def _run_once(self, begun: Any, optimizer: Any) -> None:
        begun.train(optimizer)
        with self._job.guarded(lambda: "ending the step on all ranks"):
            self._job.everyone().all_gather(None)

    def _require_batch_of_rank(self, step: int, record: records.Record) -> None:
        """Makes sure that this process trains on what the rank that it replaces had.

        Raises:
            CheckpointError: It cannot be told, or is otherwise.
        """
        earlier = self._earlier
        expected = records.find_record(earlier, attempt_files.own_rank(), step)
        if record != expected:
            why = "a new process has another batch, random numbers or learning rate than its rank"
            if expected is None:
                why = "it cannot be told which batch a rank had that died before its step"
            self._tell_unhealed(why)
            raise CheckpointError(why, where=f"step {step}")

    def _go_back(self, batch: _Batch) -> None:
        """Restores all that is kept, to the values before a batch."""
        self._kept.put_tensors_back(self._run.step)
        self._kept.put_back(batch.before)
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
        if self._obstacle:
            self._tell_unhealed(self._obstacle)
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
        # Another rank may have done it, and a process that has just begun is in its place.
        for rank in ranks if generation.current().number == self._number else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank], systems.SIGKILL)

    def _repeats(self) -> bool:
        """Does the last step once more, and then has what it had before. Collective.

        Returns:
            Whether no rank has died meanwhile.
        """
        if self._last is None:
            raise PeerFailed("a rank died between its last step and what it keeps of that")
        after, last = self._kept.collect(), self._last
        self._run.step -= 1
        try:
            self._go_back(last)
            self._run_once(last.begin(last.data), last.optimizer)
            return True
        except (PeerFailed, PipelineTimeout):
            return False
        finally:
            self._run.step += 1
            self._kept.put_tensors_back(self._run.step)
            self._kept.put_back(after)

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


def _changes(number: int) -> bool:
    """Waits a moment for the end of a generation; returns whether it has ended."""
    deadline = time.monotonic() + _CHANGE_SECONDS
    while generation.current().number == number and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return generation.current().number != number


class _Batch(NamedTuple):
    """A training batch that can run again.

    Attributes:
        step: How many steps were done before it.
        begin: Returns a ``TrainingBatch`` of the data.
        data: The batch, or a :class:`Taken`.
        optimizer: The optimizer to step.
        before: Random states, learning rate and the like before it.
    """

    step: int
    begin: Callable[[Any], Any]
    data: Any
    optimizer: Any
    before: Any
