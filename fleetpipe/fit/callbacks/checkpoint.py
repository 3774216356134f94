"""``PipelineCheckpoint``: saves a training so that it goes on with the bits that it would have."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.checkpoint.saving import Saving
from fleetpipe.errors import ConfigError, nearest, require_whole
from fleetpipe.fit.callbacks import rank_policy
from fleetpipe.fit.position import Position
from fleetpipe.launch.resume import FOLDER, STOP_SIGNALS, Run, resume

_USUAL_FOLDER = "checkpoints"


class StepManager(CheckpointManager):
    """Saves when the callback says so, and keeps which evaluation is the best."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, save_interval=sys.maxsize, **options)
        self.due = False
        self.metrics: Mapping[str, float] = {}

    def save(self, step: int, *, force: bool = False, **state: Any) -> Saving | None:
        """Saves a step that is due, or any one that is asked for."""
        return super().save(step, force=force or self.due, metrics=self.metrics, **state)


class PipelineCheckpoint(rank_policy.Callback):
    """Saves model, optimizer, random states and the position of ``fit``, on all ranks together.

    With ``fit(.., resume="auto")`` a training goes on from the newest of these checkpoints, under
    any layout, in the middle of an epoch too. What it saves is that of
    :class:`fleetpipe.CheckpointManager`. From the begin of ``fit`` to its end SIGTERM and SIGUSR1
    have all ranks finish a step, save, and end.
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
        """Takes where and how often to save.

        Args:
            folder: A folder that every rank sees. None: the ``save_dir`` of ``fit``, else the
                ``--checkpoint_dir`` of ``fleetpipe launch``, else ``checkpoints``. Each training of
                a script has one of its own.
            every_steps: Batches from one save to the next; None for none within an epoch.
            every_epochs: Epochs from one save to the next, after their evaluation; None for none.
                The end of ``fit`` is saved in any case.
            max_to_keep: How many of the newest are kept; None keeps all.
            async_save: Whether a thread writes while the training goes on.
            best: A name of the evaluation's logs and ``"min"`` or ``"max"``, as
                ``("acc", "max")``: the epoch that was best at it is kept beside the newest.

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
    def going(self, position: Position, save_dir: str | None, go_on: bool) -> Iterator[None]:
        """While it is open, a training is saved, after it went on where it was.

        Collective over the job.

        Args:
            position: Where it is.
            save_dir: The folder, where the constructor was given none.
            go_on: Whether to go on from what the folder holds.

        Raises:
            CheckpointError: The newest checkpoint is damaged, or does not fit.
            ConfigError: The folder has checkpoints and the training is to begin anew, or ``best``
                names nothing that an evaluation tells.
        """
        self._require_metric()
        home = Path(self._folder or save_dir or os.environ.get(FOLDER, _USUAL_FOLDER))
        self._manager = self._manager_of(home)
        self._manager.metrics = self._figures({})
        model, optimizer = self.model.pipeline, self.model.optimizer
        self._state: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": position}
        if not go_on and any(self.model.gather(bool(self._manager.steps()))):
            raise ConfigError(
                "the folder has the checkpoints of another training",
                got=f"{home} with steps {self._manager.steps()}",
                fix='go on with it by fit(.., resume="auto"), or name another folder',
            )
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        try:
            self._run: Run = resume(manager=self._manager, **self._state)
            self._last = self.model.global_step
            self._saved = self._last if self._manager.steps() else None
            yield
            self.cut_short()
            self._manager.wait()
        finally:
            for number, handler in handlers.items():
                # One that is ignored is so until the process, which has saved, has ended.
                if signal.getsignal(number) not in (handler, signal.SIG_IGN):
                    signal.signal(number, handler)

    def _manager_of(self, home: Path) -> StepManager:
        return StepManager(home, best=self._best, **self._options)

    def step_done(self) -> None:
        """Saves where this is a step to save. Collective.

        Raises:
            CheckpointError: It cannot be saved.
            SystemExit: The job was asked to stop, and has saved.
        """
        step = self.model.global_step
        every = self._steps
        self._manager.due = every is not None and step // every > self._last // every
        self._manager.metrics = self._figures({})
        if self._manager.due:
            self._saved = step
        self._last = step
        self._run.step = step - 1
        self._run.done()

    def epoch_done(self, epoch: int, evaluated: Mapping[str, Any]) -> None:
        """Saves where the epoch is one to save. Collective.

        Args:
            epoch: Its number.
            evaluated: What its evaluation has told; empty where there was none.

        Raises:
            CheckpointError: It cannot be saved.
        """
        if self._epochs is not None and (epoch + 1) % self._epochs == 0:
            self._save(evaluated)

    def cut_short(self) -> None:
        """Saves within an epoch, behind whose last batch the training ends. Collective.

        Raises:
            CheckpointError: It cannot be saved.
        """
        if self._saved != self.model.global_step:
            self._save({})

    def _save(self, evaluated: Mapping[str, Any]) -> None:
        self._saved = self.model.global_step
        self._manager.metrics = self._figures(evaluated)
        self._manager.save(self._saved, force=True, **self._state)

    def _figures(self, evaluated: Mapping[str, Any]) -> dict[str, float]:
        """Returns what the best step is chosen by; without an evaluation the worst there is."""
        if self._best is None:
            return {}
        name, mode = self._best
        value = evaluated.get(name, math.inf if mode == "min" else -math.inf)
        return {name: float(value[0] if isinstance(value, list) else value)}

    def _require_metric(self) -> None:
        names = self.model.metric_names
        if self._best is not None and self._best[0] not in names:
            raise ConfigError(
                "best names nothing that an evaluation tells",
                expected=" or ".join(map(repr, names)),
                got=f"{self._best[0]!r}: {nearest(self._best[0], names)}",
                fix="name the loss, or a metric given to prepare",
            )


class Nothing:
    """Stands where nothing is saved."""

    def step_done(self) -> None:
        """Does nothing."""

    def epoch_done(self, epoch: int, evaluated: Mapping[str, Any]) -> None:
        """Does nothing."""

    def cut_short(self) -> None:
        """Does nothing."""


def added(callbacks: Nest, every_steps: int | None, every_epochs: int) -> list[Any]:
    """Returns the user's callbacks with one that saves, unless they have it."""
    listed = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks or []]
    usable = [callback for callback in listed if callback]
    if not any(isinstance(callback, PipelineCheckpoint) for callback in usable):
        usable.append(PipelineCheckpoint(every_steps=every_steps, every_epochs=every_epochs))
    return usable


@contextmanager
def saved(
    callbacks: Sequence[Any], position: Position, save_dir: str | None, go_on: bool
) -> Iterator[PipelineCheckpoint | Nothing]:
    """While it is open, checkpoints save these callbacks; see :meth:`PipelineCheckpoint.going`."""
    savers = [callback for callback in callbacks if isinstance(callback, PipelineCheckpoint)]
    if not savers:
        yield Nothing()
        return
    with savers[0].going(position, save_dir, go_on):
        yield savers[0]
