"""``fleetpipe.resume``: goes on where the job was, and keeps what the next attempt goes on from.

The script is the same with and without ``fleetpipe launch``: which folder holds the checkpoints,
and which attempt this is, stands in the environment.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, TypedDict

from fleetpipe import log, systems
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.training_state import SavedData
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.config import DEFAULT_TIMEOUT
from fleetpipe.errors import PeerFailed
from fleetpipe.extras import extra
from fleetpipe.job import attempt_files, job
from fleetpipe.mesh.groups import DirectGroup, Group
from fleetpipe.paddle_api.loading import keep_workers_from_signals
from fleetpipe.paddle_types import GradScaler, Layer, LRScheduler, Optimizer, Program
from fleetpipe.representation import shows
from fleetpipe.transport import MessageKey

_log = log.logger(__name__)

#: Names the folder of checkpoints where the script does not.
FOLDER = "FLEETPIPE_CHECKPOINT_DIR"
_USUAL_FOLDER = "checkpoints"
_USUAL_INTERVAL = 100
_USUAL_NUMBER = 2
#: Signals that ask for the end after a step that is saved, and what they do otherwise.
STOP_SIGNALS = {
    **dict.fromkeys(systems.STOP_SIGNALS, signal.SIG_DFL),
    signal.SIGINT: signal.default_int_handler,
}


class State(TypedDict):
    """The objects of a run that a :class:`fleetpipe.CheckpointManager` saves."""

    model: Layer | Program
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    scaler: GradScaler | None
    data: SavedData | None


@shows("step", folder="_manager._home")
class Run:
    """A training run that may be ended after any step, and gone on with.

    Attributes:
        step: The step to go on with, from 0: as many are done.
    """

    def __init__(self, step: int, state: State, manager: CheckpointManager, kept: Any) -> None:
        self.step = step
        self._state = state
        self._manager = manager
        self._kept = kept
        self._write_begun = attempt_files.page()
        current = job.current_job()
        timeout = DEFAULT_TIMEOUT if current is None else current.timeout
        self._stopping = Stopping(job.all_ranks(), timeout)
        self._interrupted = False
        self._catch_signals()

    def steps(self, until: int) -> Iterator[int]:
        """Yields the number of each step that is left, and ends it after the loop's body.

        Collective.

        Args:
            until: How many steps the run has in all.

        Raises:
            CheckpointError: A step cannot be saved.
            SystemExit: The job was asked to stop; see :meth:`done`.
        """
        self._catch_signals()
        current = job.current_job()
        if current is not None:
            current.progress.expect(self.step, until)
        try:
            while self.step < until:
                self._write_begun(self.step + 1)
                yield self.step
                self.done()
        finally:
            # Behind the loop, in a notebook say, Ctrl-C is what it was.
            if signal.getsignal(signal.SIGINT) == self._signalled:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def done(self) -> None:
        """Ends a step: saves where this is one to save, and ends a job that is to stop. Collective.

        For loops of the script's own, after all that belongs to the step: the optimizer, the
        schedule of its learning rate, whatever else the script keeps.

        Raises:
            CheckpointError: The step cannot be saved.
            SystemExit: Some rank was asked to stop, all have saved, and the job has ended. Its code
                is 75 (``PREEMPTED`` of ``job.attempt_files``) and 130 after Ctrl-C, or 0 under
                ``fleetpipe launch``, which ends with these.
        """
        self.step += 1
        if self._kept is not None:
            self._kept.keep(self.step)
        stop = self._stopping.agreed()
        self._manager.save(self.step, force=stop, **self._state)
        if stop:
            self._leave()
        self._write_begun(self.step + 1)

    def stop(self) -> None:
        """Asks, on this rank alone, for the end of the job after a step that all ranks finish."""
        self._stopping.ask()

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # a worker of Ray's runs its script in a thread, where Python takes no handlers
        keep_workers_from_signals()
        for number, usual in STOP_SIGNALS.items():
            # A handler of the script's own stays, and may call stop().
            if signal.getsignal(number) is usual:
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT:
            # The second one ends this process at once.
            self._interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.stop()

    def _leave(self) -> None:
        self._manager.wait()
        attempt_files.tell_preempted(self.step)
        if job.all_ranks().rank == 0:
            why = "interrupted" if self._interrupted else "asked to stop"
            _log.info(f"{why}, the job saved {self.step} steps")
        for number in systems.STOP_SIGNALS:
            # The next one would end the farewell with another code.
            if not self._interrupted and signal.getsignal(number) == self._signalled:
                signal.signal(number, signal.SIG_IGN)
        job.end()
        code = attempt_files.INTERRUPTED if self._interrupted else attempt_files.PREEMPTED
        raise SystemExit(0 if attempt_files.number() else code)


def resume(
    model: Layer | Program,
    optimizer: Optimizer | None = None,
    *,
    lr_scheduler: LRScheduler | None = None,
    scaler: GradScaler | None = None,
    data: SavedData | None = None,
    manager: CheckpointManager | None = None,
) -> Run:
    """Restores the newest complete checkpoint, if there is one, and goes on from there. Collective.

    From here on SIGTERM, SIGUSR1 and the first Ctrl-C have the job finish a step, save, and end,
    unless the script has handlers of its own for them.

    Args:
        model: What ``fleet.distributed_model`` returned, a ``PipelineLayer``, any Layer, or a
            static program, as for :meth:`fleetpipe.CheckpointManager.save`.
        optimizer: What ``fleet.distributed_optimizer`` returned, or any optimizer of Paddle's.
        lr_scheduler: An ``LRScheduler``; that of the optimizer is restored without being named.
        scaler: A ``GradScaler``.
        data: What says where the run is in its data, by ``state_dict`` and ``set_state_dict``.
        manager: Where and when steps are saved. None: every 100 steps, the newest two, in the
            folder ``FLEETPIPE_CHECKPOINT_DIR`` (``fleetpipe launch --checkpoint_dir``), else
            ``checkpoints``.

    Returns:
        The run: ``step`` is the one to go on with, 0 where nothing was saved, and ``steps(n)`` goes
        through those that are left.

    Raises:
        ConfigError: An object is of another kind, or nothing can be written into the folder.
        CheckpointError: The newest checkpoint is damaged, or does not fit; nothing has changed.
        PipelineTimeout: Some rank did not come within the limit.
    """
    if manager is None:
        manager = CheckpointManager(
            os.environ.get(FOLDER, _USUAL_FOLDER),
            save_interval=_USUAL_INTERVAL,
            max_to_keep=_USUAL_NUMBER,
        )
    manager.require_folder()
    state = State(
        model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, scaler=scaler, data=data
    )
    kept = extra("kept_state.kept_state").KeptState.asked_for(Objects(**state), Ranks.of_job())
    return Run(_go_on(state, manager, kept), state, manager, kept)


def _go_on(state: State, manager: CheckpointManager, kept: Any) -> int:
    """Goes back to the newest step that is kept or saved, and returns its number. Collective."""
    saved = [step for steps in job.all_ranks().all_gather(manager.steps()) for step in steps]
    newest: int | None = None if kept is None else kept.newest()
    if kept is not None and newest is not None and newest >= max(saved, default=0):
        kept.restore(newest)
        step, where = newest, ", as they were kept in memory"
    elif saved:
        # Where one rank sees a checkpoint all restore, and one that does not says so.
        step, where = manager.restore("latest", **state).step, ""
    else:
        step, where = 0, ""
    if kept is not None:
        kept.forget_after(step)
    if step:
        _tell(f"goes on after {step} steps{where}")
    return step


def _tell(text: str) -> None:
    """Says something once for all ranks."""
    if job.all_ranks().rank == 0:
        number = attempt_files.number()
        of_job = f"attempt {number} of the job " if number else ""
        _log.info(f"{of_job}{text}")


_numbers = itertools.count()
#: What was told last and what is told now differ in their number, and numbers come again: a header
#: that was seen before is known to the transport, and one for every step would fill its memory.
_CYCLE = 2


class Stopping:
    """Asked after every step; on all ranks it says yes at the same step.

    A rank tells the others at the end of a step whether it was asked to stop, and takes what they
    told at the end of the step before, which has come by then: nobody finishes a step without all
    others. So a rank that is asked to stop finishes the step that it is in, and all do the next.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        """Makes the agreement. Collective: all ranks make as many, in the same order.

        Args:
            group: All ranks of the job.
            timeout: Seconds that the wait for what one rank told may last.
        """
        self._group = group
        self._timeout = timeout
        self._name = f"stop {next(_numbers)}"
        self._calls = 0
        self._requested = self._announced = False

    def ask(self) -> None:
        """Asks for the end, on this rank; may be called within a handler of a signal."""
        self._requested = True

    def agreed(self) -> bool:
        """Returns whether to stop after this step. Collective.

        Raises:
            PeerFailed: A rank died.
            PipelineTimeout: A rank did not finish the step before.
        """
        requested, self._announced = self._announced, self._requested
        if not isinstance(self._group, DirectGroup):
            return self._announced
        peers = [rank for rank in range(self._group.ranks) if rank != self._group.rank]
        self._calls += 1
        for rank in peers:
            # One that has done its last step and left need not be told.
            with contextlib.suppress(PeerFailed):
                self._group.transport.send(rank, self._key(self._calls), self._announced)
        if self._calls == 1:
            return False
        before = self._key(self._calls - 1)
        said = [self._group.transport.receive(rank, before, self._timeout) for rank in peers]
        return requested or any(said)

    def _key(self, number: int) -> MessageKey:
        return MessageKey("C", 0, 0, self._name, number % _CYCLE)
