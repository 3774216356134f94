"""``CheckpointManager``: saves a run at intervals, and restores it under any layout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from fleetpipe.arguments import require_folder
from fleetpipe.checkpoint.contents.attributes import Attributes
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.parts import Names, SavedModel
from fleetpipe.checkpoint.contents.training_state import SavedData
from fleetpipe.checkpoint.files import manifest, run_folder
from fleetpipe.checkpoint.files.run_folder import Retention
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.checkpoint.restoring import Restored, restore
from fleetpipe.checkpoint.saving import Saver, Saving, current_script
from fleetpipe.errors import CheckpointError, require_whole
from fleetpipe.job.job import current_job
from fleetpipe.paddle_types import GradScaler, Layer, LRScheduler, Optimizer, Program
from fleetpipe.representation import shows

Manager = TypeVar("Manager", bound="CheckpointManager")


@shows(folder="_home", save_interval="_interval", max_to_keep="_retention.max_to_keep")
class CheckpointManager:
    """Saves and restores a run in a folder that every rank of the job sees, or only rank 0.

    Ranks that do not see the folder send rank 0 their tensors; to restore, each needs a copy of it.

    Every method that takes objects is collective: all ranks of the job call it alike. A process
    outside of a job is one rank.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        save_interval: int = 1,
        max_to_keep: int | None = None,
        async_save: bool = False,
        best: tuple[str, str] | None = None,
        names: Names = None,
    ) -> None:
        """Configures how a run is saved; reads and writes no file.

        The end of ``with CheckpointManager(..) as manager:`` waits for the last save, as
        :meth:`wait` does. If an error leaves the block, this rank waits only for its own part.

        Args:
            folder: The folder of the run, the same for every rank. The first save makes it.
            save_interval: :meth:`save` does nothing at steps that are not a multiple of it.
            max_to_keep: How many of the newest steps are kept; None keeps all.
            async_save: Whether :meth:`save` returns as soon as the state has been copied to host
                memory; a thread writes it.
            best: A metric of ``metrics=`` and ``"min"`` or ``"max"``, such as ``("loss", "min")``:
                the best step is kept beside the newest, and is ``restore("best")``.
            names: For a model that is a static program: the name in the checkpoint of each of its
                parameters and statistics, such as ``{"linear_0.w_0": "0.weight"}``; others keep the
                program's names. ``"order"`` matches them in the order in which the program and the
                saved model declare them, and compares every shape.

        Raises:
            ConfigError: A value is out of range.
        """
        self._home = Path(folder).absolute()
        self._names = names
        fix = "save_interval=1 saves at every step that save is called with"
        self._interval = require_whole("save_interval", save_interval, fix=fix)
        self._retention = Retention(self._home, max_to_keep, best)
        self._saver = Saver(self._retention, async_save)
        #: The attributes of layers that are saved too; None if the run does not resume.
        self.attributes: Attributes | None = None

    def save(
        self,
        step: int,
        *,
        model: Layer | Program | SavedModel,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        data: SavedData | None = None,
        state: dict[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> Saving | None:
        """Saves a step. Collective over the job.

        Call it after every step: a step that is not saved costs nothing, except one message while
        an asynchronous save is under way.

        Args:
            step: The number of the step, 0 or more. A saved step with this number is replaced.
                Later steps are set aside, with a notice, since the run went back: ``"latest"`` is
                this step. They are renamed to ``step-00000500.aside``, which nothing reads or
                removes; renamed back, they are steps again.
            model: The result of ``fleet.distributed_model``, a ``PipelineLayer``, any Layer, or a
                static program that ``fleet.distributed_optimizer(..).minimize`` made a pipeline
                of, whose startup program has run.
            optimizer: The result of ``fleet.distributed_optimizer``, or any optimizer of Paddle's.
            lr_scheduler: An ``LRScheduler``; the optimizer's own is saved in any case.
            scaler: A ``GradScaler``.
            data: The loader or sampler that is read; its ``state_dict()`` returns values of JSON.
            state: The script's own state, by name: objects with ``state_dict`` and
                ``set_state_dict``, plain values and tensors. Each rank saves its own.
            metrics: Numbers by name; those of rank 0 are saved.
            extra: Any values of JSON; those of rank 0 are saved.
            force: Whether to save in spite of ``save_interval``.

        Returns:
            A handle, whose ``wait()`` waits until the step is on the disk. None if the step is not
            saved.

        Raises:
            ConfigError: ``step`` is no whole number from 0, or an object has a wrong type.
            CheckpointError: A rank cannot write this step, or could not write the step before in
                the background. Every rank raises. The folder is unchanged; training may go on.
            PipelineTimeout: A rank did not arrive within the limit.
        """
        rule, fix = "a step is saved under its number, 0 or more", "count the steps from 0"
        step = require_whole("step", step, 0, rule=rule, fix=fix)
        due = force or step % self._interval == 0
        self._saver.settle(wait=due)
        if not due:
            return None
        self._retention.require_metric(metrics)
        objects = self._objects(model, optimizer, lr_scheduler, scaler, data, state)
        job = current_job()
        with nullcontext() if job is None else job.progress.saving(int(step)):
            return self._saver.save(Ranks.of_job(), step, objects, metrics or {}, extra or {})

    def restore(
        self,
        step: int | str = "latest",
        *,
        model: Layer | Program | SavedModel | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        data: SavedData | None = None,
        state: dict[str, Any] | None = None,
        only: Sequence[str] | None = None,
    ) -> Restored:
        """Restores a step into newly built objects, under any layout. Collective.

        All files are read and compared before the first value changes. The random states are
        restored too.

        Args:
            step: A number, ``"latest"``, or ``"best"`` by the metric of this manager.
            model: As for :meth:`save`.
            optimizer: As for :meth:`save`; needs ``model`` as well, which names its parameters.
            lr_scheduler: As for :meth:`save`.
            scaler: As for :meth:`save`.
            data: As for :meth:`save`: ``set_state_dict`` gets what ``state_dict`` returned.
            state: As for :meth:`save`. A number or text is replaced in the dict.
            only: The objects to restore, such as ``("model",)``; any of ``model``, ``optimizer``,
                ``lr_scheduler``, ``scaler``, ``data``, ``state``, ``random``. None restores all.

        Returns:
            The step, and its ``extra`` and ``metrics``.

        Raises:
            CheckpointError: There is no such step, it is damaged, or it does not fit. Every rank
                raises; no value has changed.
            PipelineTimeout: A rank did not arrive within the limit.
        """
        self._saver.settle(wait=True)
        objects = self._objects(model, optimizer, lr_scheduler, scaler, data, state)
        return restore(Ranks.of_job(), self._retention, step, objects.only(only))

    def _objects(self, *objects: Any) -> Objects:
        """Returns the objects that a call of :meth:`save` or :meth:`restore` got, in its order."""
        named: Any = {"names": self._names, "attributes": self.attributes}
        return Objects(*objects, **named)

    def __enter__(self: Manager) -> Manager:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Waits for the last save. Collective, unless an error leaves the block.

        Raises:
            CheckpointError: A rank could not write; every rank raises.
        """
        if error is None:
            self.wait()
        else:
            self._saver.finish()
        self.release()

    def claim(self) -> None:
        """Makes this job the only one that saves into the folder, until the job ends. Collective.

        The first save does so as well.

        Raises:
            CheckpointError: Another job saves into the folder; every rank raises.
        """
        self._saver.claim(Ranks.of_job())

    def begin_anew(self) -> int:
        """Forgets a save under way, since a new process replaced a rank. Not collective.

        Returns:
            The step of that save, of which this rank's part is written; 0 for none.
        """
        return self._saver.begin_anew()

    def require_folder(self) -> None:
        """Makes the folder of the run before the first save. Not collective.

        Raises:
            ConfigError: The folder cannot be made, or cannot be written to.
        """
        require_folder("the folder of checkpoints", self._home)

    def newest_due(self, step: int) -> int:
        """Returns the newest step up to ``step`` that ``save_interval`` selects; 0 for none."""
        return step - step % self._interval

    def require_script(self) -> bool:
        """Checks that the running script is the one that saved the newest step. Collective.

        ``FLEETPIPE_OTHER_SCRIPT=1`` allows any script.

        Returns:
            Whether its arguments are those of the saved run; True if they are unknown.

        Raises:
            CheckpointError: It is another script; every rank raises.
        """
        ranks, activity = Ranks.of_job(), "asking which script has saved"

        def current_and_saved() -> list[Any]:
            """Returns this rank's script, and on rank 0 the newest step and its script."""
            steps = run_folder.complete_steps(self._home) if ranks.rank == 0 else {}
            step, folder = [*steps.items()][-1] if steps else (0, None)
            saved = {} if folder is None else manifest.read_manifest(folder).script
            return [current_script(), step, dict(saved)]

        script, step, saved = ranks.together(activity, current_and_saved)[0]
        if not script or not saved or os.environ.get("FLEETPIPE_OTHER_SCRIPT") == "1":
            return True
        if saved.get("name") != script["name"]:
            raise CheckpointError(
                "the folder has the checkpoints of another script",
                where=str(self._home),
                expected=f"checkpoints of {script['name']}, which runs",
                got=f"step {step} of {saved.get('name')}",
                fix="name another folder (fleetpipe launch --checkpoint-dir); or start the job "
                "once with FLEETPIPE_OTHER_SCRIPT=1 in the environment to go on from that step",
                permanent=True,
            )
        return bool(saved.get("arguments") == script["arguments"])

    def steps(self) -> list[int]:
        """Returns the complete steps in the folder, ascending. Not collective."""
        return [*run_folder.complete_steps(self._home)]

    def release(self) -> None:
        """Lets another job save into the folder, unless a save is under way. Not collective."""
        self._saver.release()

    def wait(self) -> None:
        """Waits until the last save is on the disk. Collective if a save is under way.

        Raises:
            CheckpointError: A rank could not write; every rank raises.
        """
        self._saver.settle(wait=True)
