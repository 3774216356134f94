"""The part of a surviving rank in healing: it repeats the step in which another rank died.

``Healing.train`` trains a batch, again if a rank dies. Each rank records digests of its last
batches (``Record``), which show whether a process that replaces a rank trains on the same: the
script may keep its position in the data, or a generator of its own, where nothing restores it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fleetpipe import atomic_file, log, systems
from fleetpipe.checkpoint.contents.training_state import random_states, set_random_states
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.contrib.healing.replacement import connect_again, require_going_on
from fleetpipe.contrib.kept_state.kept_state import KeptState
from fleetpipe.errors import CheckpointError, FleetPipeError, PeerFailed, PipelineTimeout
from fleetpipe.job import attempt_files
from fleetpipe.job.attempt_files import Generation
from fleetpipe.job.job import Job
from fleetpipe.paddle_api.distributed import communicates_over_host, has_gloo

#: Digests of a batch: of its inputs, of its labels, and of random states, learning rate and so on.
Record = list[int | None]
#: The records of all ranks: by rank, by step.
Records = Mapping[int, Mapping[int, Record]]

_log = log.logger(__name__)
_LOOK_SECONDS = 0.01
#: Seconds within which the launcher notices that a process has ended.
_CHANGE_SECONDS = 2.0


def record_of(batch: Any, before: Any, generators: Any) -> Record:
    """Returns the record of a ``TrainingBatch`` that has not run.

    Args:
        batch: The batch, or a ``ProgramBatch``.
        before: The state that is neither tensor nor data (``KeptState.collect``), before the batch
            was read.
        generators: The states of Paddle's generators that were kept after the step before. If they
            have not changed they are left out: in a static program only some ranks draw.
    """
    # NumPy's and Python's generators matter for the rows alone, which have digests; those of a
    # program's stages differ between ranks.
    left_out = {"numpy", "python", "program"}
    left_out |= {"paddle"} if before["random"]["paddle"] == generators else set()
    random = {k: v for k, v in before["random"].items() if k not in left_out}
    # Attributes are compared by name, in ``changed_since``.
    text = repr({**before, "random": random, "attributes": None})
    return [*batch.digests, zlib.crc32(text.encode())]


def write_record(home: Path, step: int, record: Record) -> None:
    """Writes this rank's records of a step and of the step before."""
    file = home / f"batch.{attempt_files.own_rank()}"
    earlier = _steps(file)
    before = _before(earlier, step)
    kept = {} if before is None else {before: earlier[before]}
    with atomic_file.draft_of(file) as draft:
        draft.write_text(json.dumps({**kept, step: record}), encoding="ascii")


def read_records(home: Path) -> Records:
    """Returns the records of all ranks of this host."""
    return {int(f.suffix[1:]): _steps(f) for f in home.glob("batch.*") if f.suffix[1:].isdecimal()}


def find_record(earlier: Records, now: Mapping[int, Record], rank: int, step: int) -> Record | None:
    """Returns the record of a rank's batch in a step; None if it is unknown.

    If the rank had not begun the step, each digest is that of a rank which had the same digest as
    this one in the step before.

    Args:
        earlier: The records of all ranks, from before the death.
        now: The records of the other ranks in the step.
        rank: The rank.
        step: The step, as the number of steps before it.
    """
    here = earlier.get(rank, {})
    before = _before(here, step)
    if step in here or before is None:
        return here.get(step)
    fields: Record = []
    for field, value in enumerate(here[before]):
        then = ((one, earlier.get(one, {}).get(before)) for one in now)
        alike = [now[one][field] for one, record in then if record and record[field] == value]
        if value is not None and not alike:
            return None
        fields.append(None if value is None else alike[0])
    return fields


def _before(steps: Mapping[int, Record], step: int) -> int | None:
    """Returns the last recorded step before a step."""
    return max((one for one in steps if one < step), default=None)


def _steps(file: Path) -> dict[int, Record]:
    if not file.exists():
        return {}
    return {int(step): row for step, row in json.loads(file.read_text(encoding="ascii")).items()}


class Taken:
    """An iterator that can return its items again, with the random states after each item."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._taken: list[tuple[Any, Any]] = []
        self._next = 0

    def __iter__(self) -> Taken:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._taken):
            self._taken.append((next(self._items), random_states()))
        else:
            set_random_states(self._taken[self._next][1])
        self._next += 1
        return self._taken[self._next - 1][0]

    def begin_anew(self) -> None:
        """Makes the next item the first one that was taken."""
        self._next = 0


class Running(Protocol):
    """The run that heals.

    Attributes:
        step: How many steps are done.
    """

    step: int

    def meet_anew(self) -> int:
        """Restarts the exchange after each step; returns a step whose save has not ended."""

    def agree_once_more(self) -> None:
        """Sends what the ranks exchange after a step, without waiting."""


class StepCall(NamedTuple):
    """A collective call of the script in a step, which every process of a rank makes alike.

    Attributes:
        step: The number of steps before.
        number: The number of the call in its step.
        what: What the call does, in words.
    """

    step: int
    number: int
    what: str


class Healing:
    """Lets training go on after the death of a rank, when another process has taken its place.

    All ranks go back to the last kept step. The other collective calls since then have one result
    on all ranks, which the new process receives instead of calling again.

    Attributes:
        counts: Whether the script has begun its steps, in which calls are counted.
    """

    def __init__(
        self,
        job: Job,
        run: Running,
        kept: KeptState,
        home: Path,
        model: Any,
        manager: CheckpointManager,
    ) -> None:
        """Prepares to heal.

        Args:
            job: The job.
            run: Its run, whose steps are kept.
            kept: The states after its last steps.
            home: The folder of the attempt.
            model: The model that is kept.
            manager: Saves the run.
        """
        self._job, self._run, self._kept, self._home, self._model = job, run, kept, home, model
        self._manager, self._number = manager, 0
        self.counts = self._within = False
        self._call = StepCall(0, -1, "")
        #: The results of the calls of the last steps.
        self._results: dict[StepCall, Any] = {}
        #: Up to this step the ranks compare which calls they make.
        self._doubted = -1
        #: The last step that cannot be repeated, and why.
        self._hindrance = -1, ""
        #: The generation in which the process that serves the job's store began.
        self._served_by = attempt_files.current_generation().since.get(0, 0) if job.alone else 0
        self._last: _Batch | None = None
        self._obstacle = kept.obstacle()
        if job.healing is not None:
            # A process that replaces a rank would begin with the first training.
            attempt_files.tell_unhealed("the script has begun a second training")
        elif not (communicates_over_host() and has_gloo()):
            # The launcher is told before a rank dies: such groups cannot be connected again.
            attempt_files.tell_unhealed("the ranks' groups are not Gloo's")
        #: In a process that replaces a rank: the records from before, and that it has yet to join.
        self._earlier, self._joins = read_records(home) if job.alone else {}, job.alone
        job.be_patient()

    def refuse(self, why: str) -> None:
        """Refuses to heal from now on; the first reason counts."""
        self._obstacle = self._obstacle or why

    def follow(self, model: Any, scaler: Any, guards: int, drawn: bool) -> None:
        """Refuses to heal from now on if a batch cannot be repeated; see ``Recovery``."""
        if model is not self._model:
            self.refuse("another model trains than the one that is kept")
        if self._last is not None and self._last.call.step == self._run.step:
            self.refuse("a step of the run has several batches")
        if scaler is not None and scaler.is_enable():
            self.refuse("a GradScaler scales the loss")
        if guards:
            self.refuse("guards compare the ranks every few batches")
        if drawn:
            self.refuse("a batch comes from a function")

    def train(self, begin: Callable[[Any], Any], data: Any, optimizer: Any) -> Any:
        """Trains ``begin(data)`` and returns it; trains again after the death of a rank.

        Collective. It returns when every rank has done the step: until then each can go back.

        Args:
            begin: Returns a ``TrainingBatch`` of the data.
            data: The batch, or an iterator.
            optimizer: The optimizer to step.

        Raises:
            CheckpointError: This process replaces a rank that had another batch.
            PeerFailed: A rank died, and the job cannot heal.
            PipelineTimeout: A wait has ended, and no rank is silent.
        """
        self.counts = True
        data = Taken(data) if hasattr(type(data), "__next__") else data
        batch = _Batch(self._next("a training batch"), begin, data, optimizer, self._kept.collect())
        # A process that joins does not repeat the comparisons of the others' first batch.
        with self._job.apart() if self._joins else contextlib.nullcontext():
            begun = begin(data)
        batch = batch._replace(record=record_of(begun, batch.before, self._kept.generators))
        write_record(self._home, batch.call.step, batch.record)
        if self._job.alone:
            self.meet()
        while True:
            try:
                self._run_once(batch, begun)
            except (PeerFailed, PipelineTimeout) as error:
                self._heal_in_step(error)
                self._go_back(batch)
                begun = begin(data)
            else:
                self._last, self._joins = batch, False
                return begun

    def _run_once(self, batch: _Batch, begun: Any) -> None:
        everyone = self._require_same(batch.call, batch.record)
        if self._joins:
            self._require_batch_of_rank(batch, everyone)
        begun.train(batch.optimizer)
        with self._job.guarded(lambda: "ending the step on all ranks"):
            self._job.everyone().all_gather(None)

    def share(
        self, what: str, act: Callable[[], Any], pass_over: Callable[[], object] | None
    ) -> Any:
        """Returns the result of ``act``, which is called again if a rank dies; see ``Job.share``.

        Raises:
            CheckpointError: The ranks do different things since a process replaced another.
            PeerFailed: A rank died, and the job cannot heal.
            PipelineTimeout: A wait has ended, and no rank is silent.
        """
        if self._within or not self.counts:
            return act()
        call, before = self._next(what), self._kept.collect() if pass_over else None
        if self._job.alone:
            self.meet()
        while call not in self._results:
            self._within = True
            try:
                self._require_same(call)
                self._results[call] = act()
                return self._results[call]
            except (PeerFailed, PipelineTimeout) as error:
                put_tensors_back = self._kept.copy()
                self._heal_in_step(error)
                put_tensors_back()
                if before is not None:
                    self._kept.put_back(before)
            finally:
                self._within = False
        if pass_over is not None:
            pass_over()
        return self._results[call]

    def hinder(self, why: str, alone: bool = True) -> None:
        """Refuses to heal in the present step, which cannot be repeated; see ``Recovery``."""
        if self.counts and not (alone and self._within):
            self._hindrance = self._run.step, why

    def _next(self, what: str) -> StepCall:
        """Counts a call, and returns it; a new step drops the results from before the last one."""
        step, last = self._run.step, self._call
        if step != last.step:
            self._results = {k: v for k, v in self._results.items() if k.step >= last.step}
        self._call = StepCall(step, last.number + 1 if step == last.step else 0, what)
        return self._call

    def _require_same(self, call: StepCall, record: Record | None = None) -> list[Any]:
        """Compares the call of all ranks, in steps that some process repeats or joins.

        Returns:
            The records of all ranks; empty in other steps.

        Raises:
            CheckpointError: A rank makes another call.
        """
        if call.step > self._doubted:
            return []
        with self._job.guarded(lambda: "comparing what the ranks do next"):
            everyone = self._job.everyone().all_gather([*call, record])
        if len({StepCall(*row) for *row, _ in everyone}) > 1:
            why = "a new process does something else in its step than the others"
            attempt_files.tell_unhealed(why)
            raise CheckpointError(why, got="; ".join(map(str, everyone)))
        return [record for *_, record in everyone]

    def _heal_in_step(self, error: PeerFailed | PipelineTimeout) -> None:
        if self.heal(error):
            # The new process sends this too, after the step before.
            self._run.agree_once_more()

    def _require_batch_of_rank(self, batch: _Batch, everyone: list[Record]) -> None:
        """Checks that this process trains on the batch of the rank that it replaces.

        Raises:
            CheckpointError: The batch is another one, or that of the rank is unknown.
        """
        here, step = attempt_files.own_rank(), batch.call.step
        now = {rank: one for rank, one in enumerate(everyone) if rank != here}
        expected = find_record(self._earlier, now, here, step)
        if batch.record != expected:
            why = "a new process has another batch, random numbers or learning rate than its rank"
            if expected is None:
                why = "it cannot be told which batch a rank had that died before its step"
            attempt_files.tell_unhealed(why)
            raise CheckpointError(why, where=f"step {step}")

    def _go_back(self, batch: _Batch) -> None:
        """Restores all kept state to the values before a batch.

        Raises:
            CheckpointError: The batch has changed an attribute of a layer, such as a counter.
        """
        changed = self._kept.changed_since(batch.before)
        if changed:
            why = f"{changed} changes in a batch, which is to be done once more"
            attempt_files.tell_unhealed(why)
            raise CheckpointError(why)
        self._kept.put_tensors_back(self._run.step)
        self._kept.put_back(batch.before)
        if isinstance(batch.data, Taken):
            batch.data.begin_anew()

    def heal(self, error: PeerFailed | PipelineTimeout) -> bool:
        """Waits for the process that replaces a rank, and connects with it. Collective.

        If a wait has ended, silent ranks are killed first. If some rank has done one step fewer
        than this one, all ranks train that step again.

        Returns:
            Whether a step was trained again.

        Raises:
            FleetPipeError: ``error``, if the job cannot heal.
        """
        since, failure, before = time.monotonic(), self._job.failure, self._number
        silent = self._job.silent_ranks()
        late = failure is not None and failure.what == "timed out" and silent
        if failure is None or not (late or failure.what in ("died", "raised")):
            raise error
        if self._obstacle:
            attempt_files.tell_unhealed(self._obstacle)
            raise error
        gone = f"rank {failure.rank} {failure.what}"
        if late:
            gone = f"rank {silent[0]} was silent"
            self._kill(silent)
        now = None
        while now is None:
            try:
                self._await_generation()
                now, step = self.meet()
            except (PeerFailed, PipelineTimeout) as obstacle:
                attempt_files.tell_unhealed(str(obstacle).splitlines()[0])
                raise error from obstacle
            if self._hindrance[0] >= step:
                attempt_files.tell_unhealed(self._hindrance[1])
                raise error
            done = self._last is not None and self._last.call.step == step
            if (done or step < self._run.step) and not self._repeats(step):
                now = None
        ranks = range(self._job.degrees.size)
        stayed = [rank for rank in ranks if now.since.get(rank, 0) <= before]
        if attempt_files.own_rank() == stayed[0]:
            seconds = time.monotonic() - since
            text = f"{gone}, another process has its place"
            text = f"{text}: the job stood for {seconds:.1f} s, and goes on after {step} steps"
            _log.info(text)
            self._job.progress.note_event("healed", text)
        return step < self._run.step

    def _kill(self, ranks: list[int]) -> None:
        processes = dict(attempt_files.started_ranks(self._home))
        # Another rank may have killed them already, and new processes have taken their places.
        for rank in ranks if attempt_files.current_generation().number == self._number else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank], systems.SIGKILL)

    def _repeats(self, step: int) -> bool:
        """Trains the last batch again, then restores the state after it. Collective.

        Returns:
            Whether no rank has died meanwhile.
        """
        after, now, last = self._kept.collect(), self._run.step, self._last
        progress = self._job.progress
        counted = progress.step
        if last is None or last.call.step != step:
            raise PeerFailed("a rank died between its last step and what it keeps of that")
        self._run.step, progress.step = step, counted - 1
        try:
            self._go_back(last)
            self._run_once(last, last.begin(last.data))
            return True
        except (PeerFailed, PipelineTimeout):
            return False
        finally:
            self._run.step, progress.step = now, counted
            self._kept.put_tensors_back(now)
            self._kept.put_back(after)

    def _await_generation(self) -> None:
        deadline = time.monotonic() + self._job.timeout
        while (now := attempt_files.current_generation()).number == self._number:
            require_going_on(now)
            if time.monotonic() > deadline:
                raise PipelineTimeout("the launcher replaced no process within the limit")
            time.sleep(_LOOK_SECONDS)

    def meet(self) -> tuple[Generation, int]:
        """Connects all ranks, again if another one dies meanwhile. Collective.

        Returns:
            The generation that is connected, and the least number of steps that a rank has done.
        """
        while True:
            now = attempt_files.current_generation()
            require_going_on(now)
            rank, step = attempt_files.own_rank(), self._run.step
            attempt_files.note_place(self._home, rank, now.number, step)
            served_by = now.since.get(0, 0)
            try:
                connect_again(self._job, now, served_by != self._served_by)
                least = self._exchange()
            except FleetPipeError:
                # The neighbours of a rank notice its death before the launcher does.
                if not _changes(now.number):
                    raise
            else:
                self._number, self._served_by = now.number, served_by
                (self._home / f"failure.{rank}").unlink(missing_ok=True)
                return now, least

    def _exchange(self) -> int:
        """Exchanges steps and results with all ranks, and finishes a save. Collective.

        Returns:
            The least number of steps that a rank has done.
        """
        lost, everyone = self._run.meet_anew(), self._job.everyone()
        with self._job.guarded(lambda: "comparing where the ranks are"):
            results = [[*call, value] for call, value in self._results.items()]
            here = [self._run.step, lost, self._kept.steps(), results]
            steps, lost_steps, kept, shared = zip(*everyone.all_gather(here))
            saved = max(everyone.broadcast(self._manager.steps(), 0), default=0)
        least: int = min(steps)
        self._doubted = max(steps)
        self._results.update((StepCall(*call), value) for rows in shared for *call, value in rows)
        due = max(*lost_steps, self._manager.newest_due(least))
        if due > saved:
            # The save of this step did not end. If a rank no longer keeps it, the newest is saved.
            step = due if all(due in one for one in kept) else least
            counts, self.counts = self.counts, False
            try:
                self._kept.save(step, self._manager)
            finally:
                self.counts = counts
                self._kept.put_tensors_back(self._run.step)
            if attempt_files.own_rank() == 0:
                _log.info(f"saved step {step}, as the save of step {due} did not end")
        return least


def _changes(number: int) -> bool:
    """Waits up to 2 s for the end of a generation; returns whether it has ended."""
    deadline = time.monotonic() + _CHANGE_SECONDS
    while attempt_files.current_generation().number == number and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return attempt_files.current_generation().number != number


class _Batch(NamedTuple):
    """A training batch that can run again.

    Attributes:
        call: Its step, and its number there.
        begin: Returns a ``TrainingBatch`` of the data.
        data: The batch, or a :class:`Taken`.
        optimizer: The optimizer to step.
        before: Random states, learning rate and so on before the batch (``KeptState.collect``).
        record: The digests of the batch.
    """

    call: StepCall
    begin: Callable[[Any], Any]
    data: Any
    optimizer: Any
    before: Any
    record: Record = []  # noqa: RUF012 - never changed
