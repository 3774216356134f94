"""``fleetpipe.resume``: restores a training run, and saves steps from which a next attempt resumes.

The script is the same with and without ``fleetpipe launch``: the environment has the folder of
checkpoints and the number of the attempt.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from fleetpipe import log, systems
from fleetpipe.checkpoint.contents.attributes import Attributes
from fleetpipe.checkpoint.contents.model_and_optimizer import without_wrappers
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.training_state import SavedData
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.config import DEFAULT_TIMEOUT
from fleetpipe.errors import CheckpointError, PeerFailed, PipelineTimeout
from fleetpipe.extras import extra
from fleetpipe.job import attempt_files, job
from fleetpipe.mesh.groups import DirectGroup, Group
from fleetpipe.paddle_api.loading import keep_workers_from_signals
from fleetpipe.paddle_types import GradScaler, Layer, LRScheduler, Optimizer, Program
from fleetpipe.representation import shows
from fleetpipe.transport import MessageKey

_log = log.logger(__name__)

#: The objects of a run, as :class:`fleetpipe.CheckpointManager` takes them.
State = dict[str, Any]
#: The variable with the folder of checkpoints, for a script that names none.
FOLDER = "FLEETPIPE_CHECKPOINT_DIR"
#: Where, every how many steps, and how many checkpoints are saved by default.
_DEFAULT_FOLDER, _DEFAULT_INTERVAL, _DEFAULT_NUMBER = "checkpoints", 100, 2
#: The signals that make a job save a step and end, with their usual handlers.
STOP_SIGNALS: dict[signal.Signals, Any] = {
    **dict.fromkeys(systems.STOP_SIGNALS, signal.SIG_DFL),
    signal.SIGINT: signal.default_int_handler,
}

#: Numbers the agreements of this process, so that each has messages of its own.
_numbers = itertools.count()
#: The numbers of messages repeat after so many steps: the transport stores each header that it has
#: seen, and two numbers tell this step's messages from the last one's.
_CYCLE = 2


@shows("step", folder="_manager._home")
class Run:
    """A training run that can be ended after any step, and resumed.

    Attributes:
        step: The next step, from 0: the number of steps done.
        other_arguments: Whether the script had other arguments when it saved the last step.
    """

    other_arguments = False

    def __init__(self, step: int, state: State, manager: CheckpointManager, kept: Any) -> None:
        """Begins after ``step`` steps; :func:`resume` makes it.

        Args:
            step: The number of steps done.
            state: The objects to save.
            manager: Saves them.
            kept: What stores this rank's state in memory after each step; None if nothing does.
        """
        self.step = step
        self._state = state
        self._manager = manager
        self._kept = kept
        self._write_begun = attempt_files.step_counter()
        current = job.current_job()
        timeout = DEFAULT_TIMEOUT if current is None else current.timeout
        self._stopping = Stopping(job.all_ranks(), timeout)
        self._interrupted = False
        self._catch_signals()

    def steps(self, until: int) -> Iterator[int]:
        """Yields the number of each step left; calls :meth:`done` after the body. Collective.

        Args:
            until: The number of steps of the whole run.

        Raises:
            CheckpointError: A step cannot be saved; or no step is left, and the script had other
                arguments when it saved them.
            SystemExit: The job was asked to stop; see :meth:`done`.
        """
        if self.other_arguments and self.step >= until:
            raise CheckpointError(
                "nothing is left to do: a run with other arguments has done all steps",
                expected=f"up to {until} steps of the arguments that the script has now",
                got=f"{self.step} steps that were saved with others",
                fix="name another folder (fleetpipe launch --checkpoint-dir) to train with these; "
                "or ask for more steps; or start the job with FLEETPIPE_OTHER_SCRIPT=1 in the "
                "environment, where the steps count as its own",
                permanent=True,
            )
        self._catch_signals()
        current = job.current_job()
        if current is not None:
            current.progress.expect(self.step, until)
        healing = None if current is None else current.healing
        if healing is not None:
            healing.counts = True
        try:
            while self.step < until:
                self._write_begun(self.step + 1)
                yield self.step
                self.done()
            if current is not None and healing is not None and current.alone:
                healing.meet()  # the others end their last step
            self._manager.wait()
        finally:
            self._manager.release()
            # After the loop, as in an evaluation or a notebook, signals have their usual handlers.
            for number, usual in STOP_SIGNALS.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, usual)

    def done(self) -> None:
        """Ends a step: saves if it is due, and ends a job that was asked to stop. Collective.

        A loop without :meth:`steps` calls it at the end of each step, after the optimizer, the
        schedule of its learning rate, and other state.

        Raises:
            CheckpointError: The step cannot be saved.
            SystemExit: A rank was asked to stop, all have saved, and the job has ended. The code is
                75 (``PREEMPTED`` of ``job.attempt_files``), 130 after Ctrl-C, or 0 under
                ``fleetpipe launch``, which itself ends with 75 or 130.
        """
        self.step += 1
        Objects(**self._state)  # raises an error for data that a first batch has shown to be wrong
        if self._kept is not None:
            self._kept.keep(self.step)
        current, ended = job.current_job(), False
        healing = None if current is None else current.healing
        if healing is not None:
            healing.counts = False
        while not ended:
            try:
                stop = self._stopping.agree()
                self._manager.save(self.step, force=stop, **self._state)
            except (PeerFailed, PipelineTimeout) as error:
                if healing is None:
                    raise
                # A process that replaces a rank ends this step with the others if it did it.
                ended, stop = not healing.heal(error), False
            else:
                ended = True
        if healing is not None:
            healing.counts = True
        if stop:
            self._leave()
        self._write_begun(self.step + 1)

    def meet_anew(self) -> int:
        """Drops the messages that the ranks have exchanged so far, since a rank was replaced.

        Returns:
            The step of a save that was under way, which may be complete; 0 for none.
        """
        self._stopping.begin_anew()
        return self._manager.begin_anew()

    def agree_once_more(self) -> None:
        """Sends all ranks again whether this one was asked to stop, as after a step."""
        self._stopping.agree()

    def stop(self) -> None:
        """Asks the job to end after a step that all ranks finish. Not collective."""
        self._stopping.ask()

    def _catch_signals(self) -> None:
        """Sets handlers of stop signals, except where the script has handlers of its own."""
        if threading.current_thread() is not threading.main_thread():
            return  # a worker of Ray runs its script in a thread, which can set no handlers
        keep_workers_from_signals()
        for number, usual in STOP_SIGNALS.items():
            # The script's own handler stays, and may call stop().
            if signal.getsignal(number) in (usual, attempt_files.note_signal):
                signal.signal(number, self._on_signal)
        if attempt_files.early_signals:
            self.stop()

    def _on_signal(self, number: int, _frame: Any) -> None:
        """Asks the job to stop; the second Ctrl-C ends this process at once."""
        if number == signal.SIGINT:
            self._interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.stop()

    def _leave(self) -> None:
        """Ends a job that was asked to stop, after its last step is saved.

        Raises:
            SystemExit: Always; see :meth:`done` for the code.
        """
        self._manager.wait()
        attempt_files.tell_preempted(self.step)
        if job.all_ranks().rank == 0 and not attempt_files.number():  # fleetpipe launch says it
            _log.info(attempt_files.how_to_go_on(self._interrupted, self.step))
        for number in systems.STOP_SIGNALS:
            # Another signal would end this process with another code.
            if not self._interrupted and signal.getsignal(number) == self._on_signal:
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
    state: dict[str, Any] | None = None,
    manager: CheckpointManager | None = None,
) -> Run:
    """Restores the newest complete checkpoint, if there is one. Collective.

    From here on SIGTERM, SIGUSR1 and the first Ctrl-C make the job finish a step, save, and end,
    unless the script has handlers of its own for them.

    Args:
        model: The result of ``fleet.distributed_model``, a ``PipelineLayer``, any Layer, or a
            static program, as for :meth:`fleetpipe.CheckpointManager.save`.
        optimizer: The result of ``fleet.distributed_optimizer``, or any optimizer of Paddle's.
        lr_scheduler: An ``LRScheduler``; the optimizer's own is restored in any case.
        scaler: A ``GradScaler``.
        data: The loader or sampler that is read, with ``state_dict`` and ``set_state_dict``.
        state: The script's own state, by name, as ``{"ema": ema, "best": 0.0}``: objects with
            ``state_dict`` and ``set_state_dict``, plain values and tensors. The script reads and
            sets the values in this dict.
        manager: The manager that saves steps. None saves every 100 steps and keeps two, in the
            folder ``FLEETPIPE_CHECKPOINT_DIR`` (``fleetpipe launch --checkpoint_dir``), else
            ``checkpoints``.

    Returns:
        The run: ``step`` is the next step, 0 if nothing was saved, and ``steps(n)`` yields the
        steps that are left of n.

    Raises:
        ConfigError: An object has another type, or the folder cannot be written to.
        CheckpointError: The newest checkpoint is damaged, or does not fit; no value has changed. Or
            a save that an earlier attempt did not finish cannot be repeated, another job saves into
            the folder, or another script has saved there.
        PipelineTimeout: A rank did not arrive within the limit.
    """
    if manager is None:
        manager = CheckpointManager(
            os.environ.get(FOLDER, _DEFAULT_FOLDER),
            save_interval=_DEFAULT_INTERVAL,
            max_to_keep=_DEFAULT_NUMBER,
        )
    manager.require_folder()
    manager.claim()
    objects_of_run: State = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    objects_of_run.update(scaler=scaler, data=data, state=state)
    current, folder = job.current_job(), attempt_files.folder()
    manager.attributes = Attributes(model, optimizer)
    if current is not None:
        current.before_batches[id(without_wrappers(model))] = manager.attributes.begin_batch
    objects = Objects(**objects_of_run, attributes=manager.attributes)
    kept = extra("kept_state.kept_state").KeptState.asked_for(objects, Ranks.of_job())
    if current is not None and current.alone:
        step, other_arguments = extra("healing.replacement").restore(kept, current, folder), False
    else:
        step, other_arguments = _restore_newest(objects_of_run, manager, kept)
    if step and state is None:
        _log_line(
            "begins anew with what the script keeps in variables of its own, as an average of "
            "weights or a best score: give that to fleetpipe.resume or fit, as state={..}",
            any_rank=current is not None and current.alone,
        )
    run = Run(step, objects_of_run, manager, kept)
    run.other_arguments = other_arguments
    heals = attempt_files.heals() and kept is not None
    if heals and current is not None and not current.local:
        healing = extra("healing.survivor").Healing
        current.healing = healing(current, run, kept, folder, model, manager)
    return run


def _restore_newest(state: State, manager: CheckpointManager, kept: Any) -> tuple[int, bool]:
    """Restores the newest step, from memory or from a checkpoint. Collective.

    Args:
        state: The objects to restore.
        manager: Has the checkpoints.
        kept: What stores this rank's state in memory; None if nothing does.

    Returns:
        The number of steps done, and whether the script had other arguments when it saved them.
    """
    same_arguments = True
    saved_steps = [step for steps in job.all_ranks().all_gather(manager.steps()) for step in steps]
    newest: int | None = None if kept is None else kept.newest()
    if kept is not None and newest is not None and newest >= max(saved_steps, default=0):
        kept.restore(newest)
        step, source = newest, ", as they were kept in memory"
    elif saved_steps:
        # If one rank sees a checkpoint, all restore; a rank that does not see it raises an error.
        same_arguments = manager.require_script()
        step, source = manager.restore("latest", **state).step, ""
    else:
        step, source = 0, ""
    if kept is not None:
        kept.forget_after(step)
    if step:
        _log_line(f"goes on after {step} steps{source}")
    if not same_arguments:
        _log_line(f"the script had other arguments when it saved step {step}")
    if max(saved_steps, default=0) < manager.newest_due(step):
        # A step is kept in memory before it is saved; the attempt may have ended in between.
        manager.save(step, force=True, **state)
        _log_line(f"saved step {step}, as an earlier attempt did not finish a save that was due")
    return step, not same_arguments


def _log_line(text: str, any_rank: bool = False) -> None:
    """Logs a line about the job.

    Args:
        text: The line.
        any_rank: Whether this rank logs it; else only the first rank does.
    """
    if any_rank or job.all_ranks().rank == 0:
        number = attempt_files.number()
        of_job = f"attempt {number} of the job " if number else ""
        _log.info(f"{of_job}{text}")


class Stopping:
    """Lets all ranks agree after every step on whether to stop there.

    At the end of a step a rank sends the others whether it was asked to stop, and receives their
    messages of the step before. These have arrived by then, since no rank finishes a step without
    the others. So after a request all ranks finish that step and the next.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        """Prepares to agree. Collective: all ranks create such objects in the same order.

        Args:
            group: All ranks of the job.
            timeout: The most seconds to wait for a message.
        """
        self._group = group
        self._timeout = timeout
        self._name = f"stop {next(_numbers)}"
        self._calls = 0
        self._requested = self._announced = False

    def ask(self) -> None:
        """Asks for the end on this rank; a signal handler may call it."""
        self._requested = True

    def agree(self) -> bool:
        """Returns whether all ranks stop after this step. Collective.

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
            # A rank that has left after its last step needs no message.
            with contextlib.suppress(PeerFailed):
                self._group.transport.send(rank, self._message_key(self._calls), self._announced)
        if self._calls == 1:
            return False
        before = self._message_key(self._calls - 1)
        requests = [self._group.transport.receive(rank, before, self._timeout) for rank in peers]
        return requested or any(requests)

    def begin_anew(self) -> None:
        """Drops the messages exchanged so far; a request to stop on this rank stays."""
        self._calls, self._announced = 0, False

    def _message_key(self, number: int) -> MessageKey:
        """Returns the key of the messages after step ``number`` of this agreement."""
        return MessageKey("L", 0, 0, self._name, number % _CYCLE)
