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
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetpipe import atomic_file, log, systems
from fleetpipe.checkpoint.contents.training_state import random_states, set_random_states
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.contrib.healing.replacement import connect_again, require_healing
from fleetpipe.contrib.kept_state.kept_state import KeptState
from fleetpipe.errors import CheckpointError, FleetPipeError, PeerFailed, PipelineTimeout
from fleetpipe.job import attempt_files
from fleetpipe.job.attempt_files import Generation
from fleetpipe.job.job import Job
from fleetpipe.paddle_api.distributed import communicates_over_host, has_gloo

if TYPE_CHECKING:
    from fleetpipe.launch.resume import Run

#: Digests (checksums) of a batch on one rank: of its inputs, of its labels, and of random states,
#: learning rate and so on. None where the rank has none.
Record = list[int | None]
#: The records of all ranks: by rank, by step.
Records = Mapping[int, Mapping[int, Record]]

_log = log.logger(__name__)
_POLL_SECONDS = 0.01
#: Seconds within which the launcher notices that a process has ended.
_CHANGE_SECONDS = 2.0


def make_record(batch: Any, state_before: Any, paddle_generators: Any) -> Record:
    """Returns digests of a training batch before it runs.

    If a rank dies, the process that replaces it must repeat a batch with the same digests.

    Args:
        batch: The batch, or a ``ProgramBatch``.
        state_before: The state that is neither tensor nor data (``KeptState.collect``), before the
            batch was read.
        paddle_generators: The states of Paddle's generators after the step before. Unchanged ones
            are left out, since with a static program only some ranks draw random numbers.
    """
    # NumPy's and Python's generators matter only for the rows, which have digests. The generators
    # of a static program's stages differ between ranks.
    left_out = {"numpy", "python", "program"}
    left_out |= {"paddle"} if state_before["random"]["paddle"] == paddle_generators else set()
    random = {k: v for k, v in state_before["random"].items() if k not in left_out}
    # Attributes are compared by name, in ``changed_since``.
    text = repr({**state_before, "random": random, "attributes": None})
    return [*batch.digests, zlib.crc32(text.encode())]


def write_record(directory: Path, step: int, record: Record) -> None:
    """Writes this rank's records of a step and of the step before."""
    file = directory / f"batch.{attempt_files.own_rank()}"
    earlier = _read_steps(file)
    before = _last_step_before(earlier, step)
    rows = {} if before is None else {before: earlier[before]}
    with atomic_file.draft_of(file) as draft:
        draft.write_text(json.dumps({**rows, step: record}), encoding="ascii")


def read_records(directory: Path) -> Records:
    """Returns the records of all ranks of this host, by rank and by step."""
    files = {file.suffix[1:]: file for file in directory.glob("batch.*")}
    return {int(rank): _read_steps(file) for rank, file in files.items() if rank.isdecimal()}


def find_record(earlier: Records, now: Mapping[int, Record], rank: int, step: int) -> Record | None:
    """Returns the record that a rank's batch must have in a step; None if it is unknown.

    If the rank died before it began the step, each digest is that of a rank with the same digest in
    the step before, since such ranks read the same data.

    Args:
        earlier: The records of all ranks, from before the death.
        now: The records of the other ranks in the step.
        rank: The rank.
        step: The number of steps before the step.
    """
    of_rank = earlier.get(rank, {})
    before = _last_step_before(of_rank, step)
    if step in of_rank or before is None:
        return of_rank.get(step)
    expected: Record = []
    for field, digest in enumerate(of_rank[before]):
        if digest is None:
            expected.append(None)
            continue
        for peer, record in now.items():
            peer_before = earlier.get(peer, {}).get(before)
            if peer_before and peer_before[field] == digest:
                expected.append(record[field])
                break
        else:
            return None
    return expected


def _last_step_before(steps: Mapping[int, Record], step: int) -> int | None:
    """Returns the last recorded step before a step; None if there is none."""
    return max((earlier for earlier in steps if earlier < step), default=None)


def _read_steps(file: Path) -> dict[int, Record]:
    """Returns a rank's records by step; none if the file does not exist."""
    if not file.exists():
        return {}
    return {int(step): row for step, row in json.loads(file.read_text(encoding="ascii")).items()}


class ReplayableIterator:
    """An iterator that can return its items again, with the random states after each item.

    A batch that is trained again reads the same data, and leaves the same random states.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        #: Each item that was read, with the random states after it.
        self._items_so_far: list[tuple[Any, Any]] = []
        self._next = 0

    def __iter__(self) -> ReplayableIterator:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._items_so_far):
            self._items_so_far.append((next(self._items), random_states()))
        else:
            set_random_states(self._items_so_far[self._next][1])
        self._next += 1
        return self._items_so_far[self._next - 1][0]

    def begin_anew(self) -> None:
        """Goes back to the first item that was read."""
        self._next = 0


class StepCall(NamedTuple):
    """The position of a collective call in the script, by which ranks recognize the same call.

    Attributes:
        step: The number of steps before.
        number: The number of the call in its step.
        action: What the call does, in words.
    """

    step: int
    number: int
    action: str


class Healing:
    """Lets training go on after the death of a rank, when another process has taken its place.

    All ranks go back to the last kept step. The other collective calls since then have one result
    on all ranks, which the new process receives instead of calling again.

    Attributes:
        counts: Whether the script has begun its steps; only from then on its calls are numbered,
            and their results kept.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        kept: KeptState,
        directory: Path,
        model: Any,
        manager: CheckpointManager,
    ) -> None:
        """Prepares to heal.

        Args:
            job: The job.
            run: The run of the script, the result of ``fleetpipe.resume``.
            kept: The stored states after the last steps of the run.
            directory: The directory of the attempt's files.
            model: The model that is kept.
            manager: Saves the run's checkpoints.
        """
        self._job, self._run, self._kept = job, run, kept
        self._directory, self._model, self._manager = directory, model, manager
        #: The number of the generation whose processes are connected.
        self._number = 0
        self.counts = self._in_shared_call = False
        #: The last call of the script.
        self._call = StepCall(0, -1, "")
        #: The results of the calls of the last two steps.
        self._results: dict[StepCall, Any] = {}
        #: Up to this step the ranks compare which calls they make.
        self._compared_until = -1
        #: The last step that cannot be repeated, and why.
        self._unrepeatable = -1, ""
        #: The generation that began with the process which serves the job's store.
        self._store_generation = 0
        self._last_batch: _Batch | None = None
        self._reason_against = kept.obstacle()
        if job.healing is not None:
            # A process that replaces a rank would begin with the first training.
            attempt_files.tell_unhealed("the script has begun a second training")
        elif not (communicates_over_host() and has_gloo()):
            # The launcher is told before a rank dies: such groups cannot be connected again.
            attempt_files.tell_unhealed("the ranks' groups are not Gloo's")
        #: Whether this process replaces a rank, and has yet to join the others.
        self._has_yet_to_join = job.alone
        #: In such a process, the records of all ranks from before.
        self._earlier_records: Records = {}
        if job.alone:
            self._store_generation = attempt_files.current_generation().since.get(0, 0)
            self._earlier_records = read_records(directory)
        job.be_patient()

    def refuse(self, why: str) -> None:
        """Lets a death restart the whole job from now on; the first reason ``why`` counts."""
        self._reason_against = self._reason_against or why

    def follow(self, model: Any, scaler: Any, guards: int, drawn: bool) -> None:
        """Lets a death restart the whole job from now on, if the model's batches cannot repeat."""
        if model is not self._model:
            self.refuse("another model trains than the one that is kept")
        if self._last_batch is not None and self._last_batch.call.step == self._run.step:
            self.refuse("a step of the run has several batches")
        if scaler is not None and scaler.is_enable():
            self.refuse("a GradScaler scales the loss")
        if guards:
            self.refuse("guards compare the ranks every few batches")
        if drawn:
            self.refuse("a batch comes from a function")

    def train(self, begin: Callable[[Any], Any], data: Any, optimizer: Any) -> Any:
        """Trains ``begin(data)`` and returns it; trains again after the death of a rank.

        Collective. Returns when every rank has done the step: until then each can go back.

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
        data = ReplayableIterator(data) if hasattr(type(data), "__next__") else data
        call = self._number_call("a training batch")
        batch = _Batch(call, begin, data, optimizer, self._kept.collect())
        # A process that joins does not repeat the comparisons of the others' first batch.
        with self._job.apart() if self._has_yet_to_join else contextlib.nullcontext():
            begun = begin(data)
        batch = batch._replace(record=make_record(begun, batch.before, self._kept.generators))
        write_record(self._directory, batch.call.step, batch.record)
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
                self._last_batch, self._has_yet_to_join = batch, False
                return begun

    def _run_once(self, batch: _Batch, begun: Any) -> None:
        """Trains a batch on all ranks, and waits until all have done it. Collective.

        Args:
            batch: The batch, with what is needed to run it again.
            begun: The result of the batch's ``begin``.
        """
        records = self._require_same_call(batch.call, batch.record)
        if self._has_yet_to_join:
            self._require_batch_of_rank(batch, records)
        begun.train(batch.optimizer)
        with self._job.guarded(lambda: "ending the step on all ranks"):
            self._job.everyone().all_gather(None)

    def share(
        self, what: str, act: Callable[[], Any], pass_over: Callable[[], object] | None
    ) -> Any:
        """Returns the result of a collective call of the script, made again if a rank dies in it.

        A process that replaces a rank gets the results of calls that the others have made already.

        Args:
            what: What the call does, in words.
            act: Makes the call.
            pass_over: Called on every rank after the result is known. None: the state needs no
                restoring when ``act`` is called again.

        Raises:
            CheckpointError: The ranks do different things since a process replaced another.
            PeerFailed: A rank died, and the job cannot heal.
            PipelineTimeout: A wait has ended, and no rank is silent.
        """
        if self._in_shared_call or not self.counts:
            return act()
        call, before = self._number_call(what), self._kept.collect() if pass_over else None
        if self._job.alone:
            self.meet()
        while call not in self._results:
            self._in_shared_call = True
            try:
                self._require_same_call(call)
                self._results[call] = act()
                return self._results[call]
            except (PeerFailed, PipelineTimeout) as error:
                put_tensors_back = self._kept.copy()
                self._heal_in_step(error)
                put_tensors_back()
                if before is not None:
                    self._kept.put_back(before)
            finally:
                self._in_shared_call = False
        if pass_over is not None:
            pass_over()
        return self._results[call]

    def forbid_healing(self, why: str, allowed_in_share: bool = True) -> None:
        """Marks the present step as one that cannot be repeated; see ``Recovery``."""
        if self.counts and not (allowed_in_share and self._in_shared_call):
            self._unrepeatable = self._run.step, why

    def _number_call(self, action: str) -> StepCall:
        """Returns the position of the call that the script makes now, and stores it as the last.

        The first call of a step drops the results of all steps before the last one.
        """
        step, last = self._run.step, self._call
        if step == last.step:
            number = last.number + 1
        else:
            number = 0
            self._results = {c: v for c, v in self._results.items() if c.step >= last.step}
        self._call = StepCall(step, number, action)
        return self._call

    def _require_same_call(self, call: StepCall, record: Record | None = None) -> list[Any]:
        """Compares all ranks' calls, in steps that a process repeats or in which one is new.

        Collective in these steps.

        Args:
            call: The call that this rank makes.
            record: The record of the batch, if the call trains one.

        Returns:
            The records of all ranks, by rank; empty in other steps.

        Raises:
            CheckpointError: A rank makes another call.
        """
        if call.step > self._compared_until:
            return []
        with self._job.guarded(lambda: "comparing what the ranks do next"):
            everyone = self._job.everyone().all_gather([*call, record])
        if len({StepCall(*fields) for *fields, _ in everyone}) > 1:
            why = "a new process does something else in its step than the others"
            attempt_files.tell_unhealed(why)
            raise CheckpointError(why, got="; ".join(map(str, everyone)))
        return [record for *_, record in everyone]

    def _heal_in_step(self, error: PeerFailed | PipelineTimeout) -> None:
        """Heals by :meth:`heal` after a death outside of a training batch. Collective."""
        if self.heal(error):
            # The new process sends this too, after the step before.
            self._run.agree_once_more()

    def _require_batch_of_rank(self, batch: _Batch, records: list[Record]) -> None:
        """Checks that this process trains on the batch of the process that it replaces.

        Args:
            batch: The batch of this process.
            records: The records of all ranks in this step, by rank.

        Raises:
            CheckpointError: The batch is another one, or that of the replaced process is unknown.
        """
        own_rank, step = attempt_files.own_rank(), batch.call.step
        now = {rank: record for rank, record in enumerate(records) if rank != own_rank}
        expected = find_record(self._earlier_records, now, own_rank, step)
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
        if isinstance(batch.data, ReplayableIterator):
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
        if self._reason_against:
            attempt_files.tell_unhealed(self._reason_against)
            raise error
        cause = f"rank {failure.rank} {failure.what}"
        if late:
            cause = f"rank {silent[0]} was silent"
            self._kill_ranks(silent)
        now = None
        while now is None:
            try:
                self._await_generation()
                now, step = self.meet()
            except (PeerFailed, PipelineTimeout) as obstacle:
                attempt_files.tell_unhealed(str(obstacle).splitlines()[0])
                raise error from obstacle
            unrepeatable_step, why = self._unrepeatable
            if unrepeatable_step >= step:
                attempt_files.tell_unhealed(why)
                raise error
            has_trained = self._last_batch is not None and self._last_batch.call.step == step
            must_repeat = has_trained or step < self._run.step
            if must_repeat and not self._train_last_batch_again(step):
                now = None
        ranks = range(self._job.degrees.size)
        stayed = [rank for rank in ranks if now.since.get(rank, 0) <= before]
        if attempt_files.own_rank() == stayed[0]:
            seconds = time.monotonic() - since
            text = f"{cause}, another process has its place"
            text = f"{text}: the job stood for {seconds:.1f} s, and goes on after {step} steps"
            _log.info(text)
            self._job.progress.note_event("healed", text)
        return step < self._run.step

    def _kill_ranks(self, ranks: list[int]) -> None:
        """Kills the processes of silent ranks, except those that are replaced already."""
        processes = dict(attempt_files.started_ranks(self._directory))
        # Another rank may have killed them already, and new processes have taken their places.
        for rank in ranks if attempt_files.current_generation().number == self._number else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank], systems.SIGKILL)

    def _train_last_batch_again(self, step: int) -> bool:
        """Trains the last batch again, for ranks that lack its step. Collective.

        Afterwards this rank has the state from before the call, perhaps one step later.

        Args:
            step: The number of steps before the batch.

        Returns:
            Whether no rank has died meanwhile.
        """
        after, now, last = self._kept.collect(), self._run.step, self._last_batch
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
        """Waits until the launcher has replaced a process, which begins a new generation."""
        deadline = time.monotonic() + self._job.timeout
        while (now := attempt_files.current_generation()).number == self._number:
            require_healing(now)
            if time.monotonic() > deadline:
                raise PipelineTimeout("the launcher replaced no process within the limit")
            time.sleep(_POLL_SECONDS)

    def meet(self) -> tuple[Generation, int]:
        """Connects all ranks, again if another one dies meanwhile. Collective.

        Returns:
            The generation that is connected, and the least number of steps that a rank has done.
        """
        while True:
            now = attempt_files.current_generation()
            require_healing(now)
            rank, step = attempt_files.own_rank(), self._run.step
            attempt_files.note_place(self._directory, rank, now.number, step)
            # Rank 0 serves the job's store.
            store_generation = now.since.get(0, 0)
            try:
                connect_again(self._job, now, store_generation != self._store_generation)
                least = self._exchange_steps_and_results()
            except FleetPipeError:
                # The neighbours of a rank notice its death before the launcher does.
                if not _generation_ends_soon(now.number):
                    raise
            else:
                self._number, self._store_generation = now.number, store_generation
                (self._directory / f"failure.{rank}").unlink(missing_ok=True)
                return now, least

    def _exchange_steps_and_results(self) -> int:
        """Exchanges steps and results with all ranks, and finishes a save. Collective.

        Returns:
            The least number of steps that a rank has done.
        """
        lost, everyone = self._run.meet_anew(), self._job.everyone()
        with self._job.guarded(lambda: "comparing where the ranks are"):
            results = [[*call, value] for call, value in self._results.items()]
            of_rank = [self._run.step, lost, self._kept.steps(), results]
            steps, lost_steps, kept_steps, results_of_ranks = zip(*everyone.all_gather(of_rank))
            saved = max(everyone.broadcast(self._manager.steps(), 0), default=0)
        least: int = min(steps)
        self._compared_until = max(steps)
        for rows in results_of_ranks:
            self._results.update((StepCall(*call), value) for *call, value in rows)
        due = max(*lost_steps, self._manager.newest_due(least))
        if due > saved:
            # The save of this step did not end. If a rank no longer keeps it, the newest is saved.
            step = due if all(due in of_rank for of_rank in kept_steps) else least
            counts, self.counts = self.counts, False
            try:
                self._kept.save(step, self._manager)
            finally:
                self.counts = counts
                self._kept.put_tensors_back(self._run.step)
            if attempt_files.own_rank() == 0:
                _log.info(f"saved step {step}, as the save of step {due} did not end")
        return least


def _generation_ends_soon(number: int) -> bool:
    """Waits up to 2 s for a generation to end; returns whether another one has begun.

    Args:
        number: The number of the generation.
    """
    deadline = time.monotonic() + _CHANGE_SECONDS
    while attempt_files.current_generation().number == number and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return attempt_files.current_generation().number != number


class _Batch(NamedTuple):
    """A training batch that can run again.

    Attributes:
        call: The position of the batch in the script.
        begin: Returns a ``TrainingBatch`` of the data.
        data: The batch, or a :class:`ReplayableIterator`.
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
