"""Saves checkpoints into the storage of a Ray Train run, from a loop or from ``Model.fit``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train

from fleetpipe.checkpoint.contents.parts import Names
from fleetpipe.checkpoint.manager import CheckpointManager
from fleetpipe.checkpoint.restoring import Restored
from fleetpipe.checkpoint.saving import Saving
from fleetpipe.errors import CheckpointError
from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint, StepManager
from fleetpipe.fit.position import Position

_STEP_PREFIX = "step-"


class RayCheckpointManager(CheckpointManager):
    """A :class:`fleetpipe.CheckpointManager` whose folder is the storage of the Ray Train run.

    A saved step is reported (``ray.train.report``) and uploaded to ``storage_path``;
    ``CheckpointConfig`` decides which steps are kept and which is the best. ``restore`` and
    ``steps`` use the step from which the attempt goes on, ``ray.train.get_checkpoint()``. Use it
    within a train loop, in the same way on all ranks; hosts need not share a disk.
    """

    def __init__(self, *, save_interval: int = 1, names: Names = None) -> None:
        """Configures how a run is saved.

        Args:
            save_interval: As for a :class:`fleetpipe.CheckpointManager`.
            names: As for a :class:`fleetpipe.CheckpointManager`.

        Raises:
            ConfigError: ``save_interval`` is below 1.
        """
        context = ray.train.get_context()
        self._folder = Path(context.get_storage().local_working_directory, "checkpoints")
        super().__init__(self._folder, save_interval=save_interval, names=names)
        self._saver.owner = None  # this worker's own, and it is uploaded whole
        self._rank = context.get_world_rank()
        if self._rank == 0:
            # An attempt that ended while it saved has left files.
            shutil.rmtree(self._folder, ignore_errors=True)

    def save(
        self, step: int, *, metrics: Mapping[str, float] | None = None, **state: Any
    ) -> Saving | None:
        """Saves a step as a :class:`fleetpipe.CheckpointManager` does, and reports it.

        Args:
            step: The number of the step; it is reported with the metrics.
            metrics: Numbers by name.
            **state: The objects to save, as for a :class:`fleetpipe.CheckpointManager`.

        Returns:
            The handle of the save, which is finished; None if the step is not saved.

        Raises:
            ConfigError: ``step`` is no valid number, or an object is of an unknown kind.
            CheckpointError: Some rank cannot save the step; every rank raises.
        """
        saving = super().save(step, metrics=metrics, **state)
        if saving is not None:
            # All files are in the folder of rank 0: its own, and those of ranks that see it.
            checkpoint = (
                ray.train.Checkpoint.from_directory(self._folder) if self._rank == 0 else None
            )
            ray.train.report(
                {**(metrics or {}), "step": step},
                checkpoint=checkpoint,
                delete_local_checkpoint_after_upload=True,
            )
        return saving

    def restore(
        self, step: int | str = "latest", *, only: Sequence[str] | None = None, **state: Any
    ) -> Restored:
        """Restores the checkpoint that the attempt goes on from.

        Raises:
            CheckpointError: There is no checkpoint, or it does not fit.
        """
        newest = ray.train.get_checkpoint()
        if newest is None:
            raise CheckpointError(
                "this run has reported no checkpoint yet",
                fix="begin without restoring where steps() is empty",
            )
        with newest.as_directory() as folder:
            return CheckpointManager(folder, names=self._names).restore(step, only=only, **state)

    def steps(self) -> list[int]:
        """Returns the steps in the checkpoint that the attempt goes on from. Not collective."""
        newest = ray.train.get_checkpoint()
        if newest is None:
            return []
        entries = newest.filesystem.get_file_info(pyarrow.fs.FileSelector(newest.path))
        names = [entry.base_name for entry in entries]
        steps = [name for name in names if name.startswith(_STEP_PREFIX)]
        return sorted(int(name.removeprefix(_STEP_PREFIX)) for name in steps)


class _ReportingManager(StepManager, RayCheckpointManager):
    """The manager of a ``ReportCallback``: the callback decides when to save and report."""

    def __init__(self) -> None:
        RayCheckpointManager.__init__(self, save_interval=sys.maxsize)


class ReportCallback(PipelineCheckpoint):
    """Reports to Ray Train from ``Model.fit``: loss, metrics, and a checkpoint to go on from.

    A ``fit`` with it goes on where an earlier attempt ended, even in the middle of an epoch.
    """

    def __init__(self, every_steps: int | None = None, every_epochs: int | None = 1) -> None:
        """Sets how often it reports.

        Args:
            every_steps: Batches from one report to the next; None for none within an epoch.
            every_epochs: Epochs from one report to the next, after their evaluation; None for none.
                The end of ``fit`` is reported in any case.

        Raises:
            ConfigError: A number is below 1.
        """
        super().__init__(None, every_steps, every_epochs, max_to_keep=None)
        self._logs: dict[str, float] = {}

    @contextmanager
    def saving(
        self,
        position: Position,
        save_dir: str | None,
        resumes: bool,
        state: dict[str, Any] | None = None,
    ) -> Iterator[PipelineCheckpoint]:
        """In this context, a training, new or resumed, is reported to Ray. Collective.

        Args:
            position: The position in the data.
            save_dir: Without effect: the folder is Ray's.
            resumes: Without effect: the training always goes on from the newest checkpoint.
            state: The script's own state.
        """
        with super().saving(position, save_dir, True, state):
            yield self

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Stores the figures of the batch for the next report."""
        self._logs = _numeric_logs(logs or {})

    def _new_manager(self, run_directory: Path) -> StepManager:
        """Returns a manager that reports to Ray Train; ``run_directory`` has no effect."""
        return _ReportingManager()

    def _checkpoint_metrics(self, evaluated: Mapping[str, Any]) -> dict[str, float]:
        """Returns the figures to report: the last batch's, and ``eval_..`` of an evaluation."""
        return {**self._logs, **{f"eval_{k}": v for k, v in _numeric_logs(evaluated).items()}}


def _numeric_logs(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in the logs of a callback by name, without step and batch size."""
    numbers = {}
    for name, value in logs.items():
        if isinstance(value, list) and value:
            value = value[0]  # Paddle gives a loss as a list of one
        if isinstance(value, (int, float)) and name not in ("step", "batch_size"):
            numbers[name] = float(value)
    return numbers
