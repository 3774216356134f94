"""Restores a step: all ranks read and compare before a rank changes a value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe.checkpoint.contents import training_state
from fleetpipe.checkpoint.contents.objects import Objects, trees_for_rank
from fleetpipe.checkpoint.contents.parts import MODEL, STATE, SavedPart, TensorName, without_copies
from fleetpipe.checkpoint.contents.training_state import TrainingState
from fleetpipe.checkpoint.files import writer
from fleetpipe.checkpoint.files.manifest import SavedStep, StepReader
from fleetpipe.checkpoint.files.run_folder import LATEST, Retention
from fleetpipe.checkpoint.ranks import RankCoordinates, Ranks
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.parts import LocalTensor
from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.paddle_types import Layer, Optimizer


class Restored(NamedTuple):
    """The result of a restore.

    Attributes:
        step: The step that was restored.
        extra: The ``extra`` that was saved with it.
        metrics: The ``metrics`` that were saved with it.
    """

    step: int
    extra: Mapping[str, Any]
    metrics: Mapping[str, float]


def restore(ranks: Ranks, retention: Retention, step: int | str, objects: Objects) -> Restored:
    """Restores a step into objects. Collective over ``ranks``.

    Args:
        ranks: All ranks of the job.
        retention: The folder of the run.
        step: The number of the step, ``"latest"`` or ``"best"``.
        objects: The objects to restore.

    Raises:
        CheckpointError: There is no such step, it is damaged, or it does not fit. Every rank
            raises; no value has changed.
    """
    activity = f"restoring step {step!r}"

    def name_of_step_folder() -> str:
        return retention.step_folder(step).name if ranks.rank == 0 else ""

    folder = retention.run_directory / ranks.together(activity, name_of_step_folder)[0]
    return restore_from(ranks, activity, lambda: (StepReader(folder), objects))


@dynamic_mode()
def restore_from(
    ranks: Ranks, activity: str, begin: Callable[[], tuple[SavedStep, Objects]]
) -> Restored:
    """Restores objects from a checkpoint that each rank opens. Collective over ``ranks``.

    Args:
        ranks: All ranks of the job.
        activity: A phrase for messages, such as ``restoring step 3``.
        begin: Opens the checkpoint; returns it, and the objects to restore.

    Raises:
        CheckpointError: As for :func:`restore`.
    """
    attempt = _Attempt(begin)
    try:
        ranks.together(activity, lambda: attempt.prepare(ranks))
    except BaseException:
        attempt.abandon()
        raise
    ranks.together(activity, attempt.fill)
    attempt.finish(ranks.coordinates)
    manifest = attempt.reader.manifest
    return Restored(manifest.step, attempt.state["extra"], manifest.metrics)


def load_single(
    model: Layer,
    folder: str | os.PathLike[str],
    step: int | str = LATEST,
    optimizer: Optimizer | None = None,
) -> int:
    """Loads a checkpoint of any job into a model of one process. Not collective.

    Args:
        model: Any Layer with all its tensors in this process. It has the names of the saved model,
            as an ``nn.Sequential`` of the list of layers does, or the same parameters and buffers
            in the same order.
        folder: The folder of the run.
        step: A number, or ``"latest"``.
        optimizer: An optimizer of Paddle's on the model's parameters, which gets its state too.

    Returns:
        The step.

    Raises:
        CheckpointError: There is no such step, it is damaged, or it does not fit; no value has
            changed.
    """
    objects = Objects(model, optimizer, random=False)
    return restore(Ranks(SoleGroup()), Retention(Path(folder)), step, objects).step


class _Attempt:
    """A restore on one rank, in several calls, so that all ranks can agree in between.

    The calls are :meth:`prepare`, which changes no value, then :meth:`abandon` after an error, or
    :meth:`fill` and :meth:`finish`.

    Attributes:
        reader: The checkpoint, once it is open.
        state: The contents of ``state.json``, once they are read.
    """

    reader: SavedStep
    state: dict[str, Any]
    _objects: Objects
    _training: TrainingState

    def __init__(self, begin: Callable[[], tuple[SavedStep, Objects]]) -> None:
        self._begin = begin
        self._parts: list[SavedPart] = []
        self._wanted: Mapping[TensorName, LocalTensor] = {}

    def prepare(self, ranks: Ranks) -> None:
        """Checks the part of the files that falls to this rank, and that all objects fit.

        Raises:
            CheckpointError: A file is damaged, or the checkpoint does not fit.
        """
        self.reader, self._objects = self._begin()
        self.state = self.reader.text(training_state.FILE)
        self.reader.check_texts()
        model = self._objects.model_part()
        self._training = self._objects.training_state(model)
        self._training.require(self.state)
        optimizer = self._objects.optimizer_part(model)
        if model is not None and self._objects.model is not None:
            self._parts.append(model)
        if optimizer is not None:
            self._parts.append(optimizer)
        if self._objects.state is not None:
            states = self.state.get(STATE)
            of_rank = None if states is None else trees_for_rank(states, ranks.coordinates)
            self._parts.append(self._objects.script_part(ranks.coordinates, of_rank))
        saved = self.reader.manifest.saved
        if model is not None:
            saved = without_copies(saved, model.order(), model.plain_names, self._bytes_of)
        wanted = {name: local for part in self._parts for name, local in part.wanted(saved).items()}
        replica, replicas = ranks.coordinates.replica
        if replicas == saved.replicas:
            # This replica's running statistics come from those of its own in the checkpoint.
            wanted = {
                name.of_replica(replica)
                if local.differs and name.of_replica(replica) in saved.tensors
                else name: local
                for name, local in wanted.items()
            }
        self._wanted = wanted
        self.reader.check(self._objects.groups(), ranks.rank, ranks.count)

    def _bytes_of(self, name: str) -> bytes:
        """Returns the saved bytes of a tensor of the model, by its name."""
        full_name = TensorName(MODEL, name)
        memory = bytearray(self.reader.manifest.saved.tensors[full_name].nbytes)
        with self.reader.opened() as read:
            read(full_name, None, memoryview(memory))
        return bytes(memory)

    def abandon(self) -> None:
        """Undoes what :meth:`prepare` has allocated, after an error on any rank."""
        for part in self._parts:
            part.abandon()

    def fill(self) -> None:
        """Reads the values of all tensors of this rank into them."""
        with self.reader.opened() as read:
            for name, local in self._wanted.items():
                value, memory = writer.empty_like(local)
                read(name, local.cut, memory)
                writer.assign(local, value)

    def finish(self, coordinates: RankCoordinates) -> None:
        """Hands the tensors to the objects, and restores all other state.

        ``coordinates`` are the coordinates of this rank.
        """
        for part in self._parts:
            part.settle()
        self._training.put_back(self.state, coordinates)
        if self._objects.random:
            self._training.put_back_random_of(coordinates, self.state["random"])
