"""Defines ``PipelineCheckpoint``, which saves a training so that it resumes with the same bits."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.checkpoint.saving import Saving
from fleetpipe.errors import ConfigError, nearest, require_whole
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.fit.position import Position
from fleetpipe.launch.resume import FOLDER, STOP_SIGNALS, Run, resume

#: The folder of checkpoints if nothing names another.
_DEFAULT_FOLDER = "checkpoints"


class StepManager(CheckpointManager):
    """A checkpoint manager of a ``fit``, which saves when the callback asks for it.

    Attributes:
        due: Whether the next step is saved.
        every: Batches from one save to the next within an epoch; None for none.
        metrics: The metrics of the next checkpoint, by name.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, save_interval=sys.maxsize, **options)
        self.due = False
        self.every: int | None = None
        self.metrics: Mapping[str, float] = {}

    def newest_due(self, step: int) -> int:
        """Returns the newest step, at most ``step``, to be saved by ``every``; 0 if none."""
        return 0 if self.every is None else step - step % self.every

    def save(self, step: int, *, force: bool = False, **state: Any) -> Saving | None:
        """Saves a step if ``due`` is set or ``force`` is given."""
        return super().save(step, force=force or self.due, metrics=self.metrics, **state)


class PipelineCheckpoint(rank_policy.Callback):
    """Saves model, optimizer, random states and the position of ``fit``, on all ranks together.

    With ``fit(.., resume="auto")`` a training resumes from the newest of these checkpoints, under
    any layout, also in the middle of an epoch. The files are those of
    :class:`fleetpipe.CheckpointManager`. While ``fit`` runs, SIGTERM and SIGUSR1 make all ranks
    finish a step, save, and end.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        max_to_keep: int | None = 2,
        async_save: bool = False,
        best: tuple[str, str] | None = None,
    ) -> None:
        """Configures where and how often to save.

        Args:
            folder: A folder that every rank sees. None: the ``save_dir`` of ``fit``, else the
                ``--checkpoint_dir`` of ``fleetpipe launch``, else ``checkpoints``. Each training of
                a script needs a folder of its own.
            every_steps: Batches from one save to the next; None saves none within an epoch.
            every_epochs: Epochs from one save to the next, after their evaluation; None saves none.
                The end of ``fit`` is saved in any case.
            max_to_keep: The number of newest checkpoints that stay; None keeps all.
            async_save: Whether a thread writes while the training goes on.
            best: A name in the logs of evaluations and ``"min"`` or ``"max"``, as
                ``("acc", "max")``: the checkpoint of the best epoch is kept beside the newest.

        Raises:
            ConfigError: A number is below 1.
        """
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs)):
            if value is not None:
                require_whole(name, value, fix=f"{name}=None is for never")
        self._folder = folder
        self._steps, self._epochs = every_steps, every_epochs
        self._options: dict[str, Any] = {"max_to_keep": max_to_keep, "async_save": async_save}
        self._best = best
        self._saved: int | None = None

    @contextmanager
    def saving(
        self,
        position: Position,
        save_dir: str | None,
        resumes: bool,
        state: dict[str, Any] | None = None,
    ) -> Iterator[PipelineCheckpoint]:
        """Opens a context in which a training, new or resumed, is saved. Collective over the job.

        Args:
            position: The position of the training in its data, which a checkpoint sets.
            save_dir: The folder to use if the constructor got none.
            resumes: Whether to resume from the newest checkpoint of the folder.
            state: The script's own state; the states of callbacks that only this rank runs are
                added.

        Raises:
            CheckpointError: The newest checkpoint is damaged, or does not fit.
            ConfigError: The folder has checkpoints and ``resumes`` is False, or ``best`` names
                nothing in the logs of evaluations.
        """
        self._require_metric()
        run_directory = Path(self._folder or save_dir or os.environ.get(FOLDER, _DEFAULT_FOLDER))
        self._manager = self._new_manager(run_directory)
        self._manager.every = self._steps
        self._manager.metrics = self._checkpoint_metrics({})
        model, optimizer = self.model.pipeline, self.model.optimizer
        self._state: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": position}
        if not resumes and any(self.model.gather(bool(self._manager.steps()))):
            raise ConfigError(
                "the folder has the checkpoints of another training",
                got=f"{run_directory} with steps {self._manager.steps()}",
                fix='go on with it by fit(.., resume="auto"), or name another folder',
            )
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        callbacks = position.callbacks_of_this_rank()
        saved_state: dict[str, Any] = {} if state is None else state  # the script's own dict
        if callbacks or state is not None:
            self._state["state"] = saved_state
        try:
            saved_state.update(callbacks)
            self._run: Run = resume(manager=self._manager, **self._state)
            self._last = self.model.global_step
            # A state from memory may be newer than the folder, which not every rank sees.
            steps_by_rank = self.model.gather(self._manager.steps())
            is_saved = any(self._last in steps for steps in steps_by_rank)
            self._saved = self._last if is_saved else None
            yield self
            self.save_unfinished_epoch()
            self.model.pipeline.require_running().share("ending the last save", self._manager.wait)
        finally:
            for name in callbacks:
                saved_state.pop(name, None)
            for number, handler in handlers.items():
                # A signal that is ignored now stays so: the process has saved, and ends.
                if signal.getsignal(number) not in (handler, signal.SIG_IGN):
                    signal.signal(number, handler)

    def _new_manager(self, run_directory: Path) -> StepManager:
        """Returns a manager that saves into a folder; Ray's callback overrides this."""
        return StepManager(run_directory, best=self._best, **self._options)

    def after_step(self) -> None:
        """Saves the step that was trained if ``every_steps`` makes it due. Collective.

        Raises:
            CheckpointError: The checkpoint cannot be written.
            SystemExit: The job was asked to stop, and has saved.
        """
        step = self.model.global_step
        every = self._steps
        self._manager.due = every is not None and step // every > self._last // every
        self._manager.metrics = self._checkpoint_metrics({})
        if self._manager.due:
            self._saved = step
        self._last = step
        self._run.step = step - 1
        self._run.done()

    def after_epoch(self, epoch: int, evaluated: Mapping[str, Any]) -> None:
        """Saves the epoch that ended if ``every_epochs`` makes it due. Collective.

        Args:
            epoch: The number of the epoch, from 0.
            evaluated: The logs of the epoch's evaluation; empty without one.

        Raises:
            CheckpointError: The checkpoint cannot be written.
        """
        if self._epochs is not None and (epoch + 1) % self._epochs == 0:
            self._save(evaluated)

    def save_unfinished_epoch(self) -> None:
        """Saves a training that ends within an epoch, unless its last step is saved. Collective.

        Raises:
            CheckpointError: The checkpoint cannot be written.
        """
        if self._saved != self.model.global_step:
            self._save({})

    def _save(self, evaluated: Mapping[str, Any]) -> None:
        """Saves the current step, with the metrics of an evaluation. Collective."""
        self._saved = self.model.global_step
        self._manager.metrics = self._checkpoint_metrics(evaluated)

        def save_this_step() -> None:
            self._manager.save(self.model.global_step, force=True, **self._state)

        self.model.pipeline.require_running().share("saving", save_this_step)

    def _checkpoint_metrics(self, evaluated: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metric of ``best``, by name; without an evaluation, as the worst number.

        Args:
            evaluated: The logs of an evaluation; empty without one.
        """
        if self._best is None:
            return {}
        name, mode = self._best
        value = evaluated.get(name, math.inf if mode == "min" else -math.inf)
        return {name: float(value[0] if isinstance(value, list) else value)}

    def _require_metric(self) -> None:
        """Raises ConfigError if ``best`` names nothing in the logs of evaluations."""
        names = self.model.metric_names
        if self._best is not None and self._best[0] not in names:
            raise ConfigError(
                "best names nothing that an evaluation tells",
                expected=" or ".join(map(repr, names)),
                got=f"{self._best[0]!r}: {nearest(self._best[0], names)}",
                fix="name the loss, or a metric given to prepare",
            )
