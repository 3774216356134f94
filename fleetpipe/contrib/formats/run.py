"""Steps of fleetpipe's own runs; every byte is compared with its checksum before its use."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fleetpipe.checkpoint.contents import training_state
from fleetpipe.checkpoint.contents.parts import GROUPS, MODEL, OPTIMIZER, TensorName
from fleetpipe.checkpoint.files import run_folder
from fleetpipe.checkpoint.files.manifest import Manifest
from fleetpipe.checkpoint.files.plan import Holding, Inventory, indexes, plan_files
from fleetpipe.checkpoint.files.reader import StepReader
from fleetpipe.checkpoint.files.run_folder import Retention, step_in
from fleetpipe.checkpoint.files.writer import Assignment, described_files, write
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.contrib.formats.contents import Checkpoint, LazyTensor, bits, memory_of
from fleetpipe.errors import CheckpointError
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.parts import Described, Region
from fleetpipe.paddle_api import VERSION
from fleetpipe.version import __version__

SCHEDULER = "lr_scheduler"


def read_step(path: Path, step: int | None = None) -> Checkpoint:
    """Reads a step of a run.

    Raises:
        CheckpointError: There is no such step, or it is damaged.
    """
    reader = StepReader(step_in(path, step))
    reader.check(GROUPS)
    contents = reader.manifest.tensors
    model = [TensorName(MODEL, name) for name in reader.manifest.order]
    names = [*model, *(name for name in contents if name.group != MODEL)]
    return Checkpoint(
        {name: LazyTensor(contents[name].tensor, _reading(reader, name)) for name in names},
        reader.manifest.step,
        reader.text(training_state.FILE).get(SCHEDULER),
        plain_order=reader.manifest.plain_order,
    )


def _reading(reader: StepReader, name: TensorName) -> Callable[[Region | None], np.ndarray]:
    def read(cut: Region | None) -> np.ndarray:
        described: Described = reader.manifest.tensors[name].tensor
        shape = described.shape if cut is None else cut.part(described.shape)
        array = np.empty(shape, bits(described))
        with reader.opened() as read_into:
            read_into(name, cut, memory_of(array))
        return array

    return read


def write_step(state: Checkpoint, run_directory: Path, step: int) -> None:
    """Saves a step of a run. The random states are those of this process.

    Raises:
        CheckpointError: The run has this step, or later ones; or a tensor cannot be read.
        OSError: A file cannot be written.
    """
    later = [number for number in run_folder.complete_steps(run_directory) if number >= step]
    if later:
        raise CheckpointError(
            f"the run has step {step} or later ones, which are not written over",
            where=str(run_directory),
            got=f"steps {later}",
            fix=f"--step {max(later) + 1}, or another folder",
        )
    ranks = Ranks(SoleGroup())
    states = {"extra": {}, "random": training_state.random_states()}
    if state.scheduler is not None:
        states[SCHEDULER] = state.scheduler
    merged = training_state.merge_states([states], [ranks.place])
    holdings = {
        name: Holding(tensor.described, None, False) for name, tensor in state.tensors.items()
    }
    plan = plan_files([Inventory(holdings)])
    text = training_state.to_text({"step": step, **merged})
    texts = {**indexes(plan), training_state.FILE: text}
    order, versions = (*state.of(MODEL),), {"fleetpipe": __version__, "paddle": VERSION}
    files, optimizer = described_files(plan, texts), _optimizer(state)
    contents = Manifest(
        *(step, files, {}, order, optimizer, {}, ranks.layout, versions, state.plain_order)
    )
    made = not run_directory.exists()
    draft = run_folder.draft_of(run_directory, step, uuid.uuid4().hex[:8])
    try:
        draft.mkdir(parents=True)
        task = Assignment(Retention(run_directory), draft, plan, 0, 1, contents, texts)
        write(task, lambda name: memory_of(state.tensors[name].read()))
    except BaseException:
        run_folder.remove_left(run_directory if made else draft)
        raise


def _optimizer(state: Checkpoint) -> str | None:
    """Returns the class of optimizers with such a state; AdamW for Trainers of libraries."""
    kinds = {name.rpartition("/")[2] for name in state.of(OPTIMIZER)}
    if not kinds:
        return None
    return "Momentum" if kinds == {"velocity_0"} else "AdamW"
