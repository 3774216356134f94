"""Loads a checkpoint of any format into a job or a single-process model without converting it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.checkpoint.contents.layer_and_optimizer import unwrap
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.parts import MODEL, OPTIMIZER, SavedModel, TensorName
from fleetpipe.checkpoint.files.manifest import Entry, Manifest
from fleetpipe.checkpoint.files.reader import SavedStep, StepReader
from fleetpipe.checkpoint.files.run_folder import step_in
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.checkpoint.restoring import restore_from
from fleetpipe.contrib.formats import run
from fleetpipe.contrib.formats.contents import Checkpoint, memory_of
from fleetpipe.contrib.formats.convert import FLEETPIPE, FORMATS, format_of, read_checkpoint
from fleetpipe.contrib.formats.name_map import read_map
from fleetpipe.errors import ConfigError, nearest
from fleetpipe.log import logger, once
from fleetpipe.mesh.parts import Region
from fleetpipe.paddle_api.optimizer import scheduler_of
from fleetpipe.paddle_types import Layer, Optimizer, Program

_log = logger(__name__)


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: Layer | Program | SavedModel,
    optimizer: Optimizer | None = None,
    source_format: str | None = None,
    names: str | os.PathLike[str] | None = None,
    reverse_names: bool = False,
) -> int:
    """Loads a checkpoint of any format that ``fleetpipe checkpoint convert`` reads. Collective.

    Every rank reads the tensors that it holds from the folder, one after another. All ranks compare
    names, dtypes and shapes before the first value changes. Random states stay unchanged.

    Args:
        folder: The folder of one step, the same for every rank or a copy; or of a run of fleetpipe.
        model: As for :meth:`fleetpipe.CheckpointManager.restore`: under the names of the
            checkpoint, or with the same parameters and buffers in the same order.
        optimizer: Receives its state and its scheduler's state, if the checkpoint has them. None:
            only the model is loaded.
        source_format: A format in the table of the guide; None: the one that the folder has.
        names: A map of names: the path of a file, or the name of one that fleetpipe has.
        reverse_names: Whether the map is read from right to left.

    Returns:
        The step of the checkpoint; 0 if unknown.

    Raises:
        CheckpointError: The checkpoint is damaged or incomplete, or does not fit. Every rank
            raises, and nothing has changed on any.
        ConfigError: The map of names is not valid, or does not fit.
        PipelineTimeout: Some rank did not come within the limit.
    """
    path = Path(folder)
    objects = Objects(model, optimizer, random=False)

    def begin() -> tuple[SavedStep, Objects]:
        read_as = source_format or format_of(path)
        if read_as not in FORMATS:
            raise ConfigError(f"no format is {read_as!r}", fix=nearest(read_as, FORMATS))
        renaming = None if names is None else read_map(os.fspath(names), reverse=reverse_names)
        if read_as == FLEETPIPE and renaming is None:
            return StepReader(step_in(path)), objects
        state = read_checkpoint(path, read_as, renaming)
        return _StepOfAnother(state, optimizer), _fitting(objects, state)

    return restore_from(Ranks.of_job(), f"loading {path.name}", begin).step


def _fitting(objects: Objects, state: Checkpoint) -> Objects:
    """Returns the objects to load: without the learning rate if the checkpoint has none."""
    if objects.optimizer is None or state.scheduler is not None:
        return objects
    if scheduler_of(unwrap(objects.optimizer)) is not None:
        once(
            _log.warning,
            "the checkpoint has no state of the learning rate's scheduler, which stays",
        )
    return replace(objects, rate=False)


class _StepOfAnother:
    """Another program's checkpoint as a step of fleetpipe's; it has no checksums."""

    def __init__(self, state: Checkpoint, optimizer: Optimizer | None) -> None:
        self._state = state
        entries = {name: Entry("", tensor.described, ()) for name, tensor in state.tensors.items()}
        kind = None
        if optimizer is not None and state.of(OPTIMIZER):
            # No other format says which it is: the kinds of its tensors are compared.
            kind = type(unwrap(optimizer)).__name__
        self.manifest = Manifest(
            step=state.step or 0,
            files={},
            tensors=entries,
            order=(*state.of(MODEL),),
            optimizer=kind,
            metrics={},
            layout={},
            versions={},
            plain_order=state.plain_order,
        )

    def text(self, _name: str) -> dict[str, Any]:
        """Returns everything except tensors."""
        rate = {} if self._state.scheduler is None else {run.SCHEDULER: self._state.scheduler}
        return {"extra": {}, **rate}

    def check_texts(self) -> None:
        """Does nothing."""

    def check(self, _groups: Collection[str], _share: int, _shares: int) -> None:
        """Does nothing: the indices of its files were compared when they were opened."""

    @contextmanager
    def opened(self) -> Iterator[Callable[[TensorName, Region | None, memoryview], None]]:
        """Yields a function that reads a part of a tensor into memory."""

        def read(name: TensorName, cut: Region | None, memory: memoryview) -> None:
            memory[:] = memory_of(np.ascontiguousarray(self._state.tensors[name].read(cut)))

        yield read
