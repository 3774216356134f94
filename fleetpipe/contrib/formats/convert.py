"""Converts a checkpoint of any format to any other, or loads it into a job or a plain model.

Here are the table of formats, ``FORMATS``, and the reader and writer of fleetpipe's own runs, whose
checksums are compared before any use.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.atomic_file import appearing
from fleetpipe.checkpoint.contents import training_state
from fleetpipe.checkpoint.contents.model_and_optimizer import unwrap
from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.contents.parts import (
    GROUPS,
    MASTER_WEIGHTS,
    MODEL,
    OPTIMIZER,
    SavedModel,
    TensorName,
)
from fleetpipe.checkpoint.files import run_folder
from fleetpipe.checkpoint.files.manifest import Entry, Manifest, SavedStep, StepReader
from fleetpipe.checkpoint.files.run_folder import (
    Retention,
    complete_steps,
    find_step,
    is_checkpoint,
)
from fleetpipe.checkpoint.files.tensors import indexes
from fleetpipe.checkpoint.files.writer import Assignment, described_files, write
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.checkpoint.restoring import restore_from
from fleetpipe.contrib.formats import distributed, model_files
from fleetpipe.contrib.formats.contents import (
    Checkpoint,
    LazyTensor,
    bits_dtype,
    join_names,
    memory_of,
    paddle_tensor,
)
from fleetpipe.contrib.formats.name_map import NameMap, read_map, rename
from fleetpipe.errors import CheckpointError, ConfigError, FleetPipeError, nearest
from fleetpipe.log import logger, once
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.parts import Described, Region
from fleetpipe.paddle_api import VERSION
from fleetpipe.paddle_api.optimizer import scheduler_of
from fleetpipe.paddle_types import Layer, Optimizer, Program
from fleetpipe.version import __version__

__all__ = ["FORMATS", "Format", "convert", "format_of", "read_map", "write_parameters"]


#: The key of the scheduler's state in fleetpipe's own files.
_SCHEDULER = "lr_scheduler"

FLEETPIPE, FLEET, PRETRAINED = "fleetpipe", "fleet", "pretrained"
_ALL_GROUPS = (MODEL, OPTIMIZER, MASTER_WEIGHTS)

_log = logger(__name__)


def read_step(path: Path, step: int | None = None) -> Checkpoint:
    """Reads a step of a run of fleetpipe, after a comparison of all checksums.

    Args:
        path: The folder of a run, or of a step.
        step: The number of the step; None is ``path`` itself if it is a step, else the newest.

    Raises:
        CheckpointError: There is no such step, or it is damaged.
    """
    reader = StepReader(find_step(path, step))
    reader.check(GROUPS)
    contents = reader.manifest.tensors
    model = [TensorName(MODEL, name) for name in reader.manifest.order]
    names = [*model, *(name for name in contents if name.group != MODEL)]
    return Checkpoint(
        {name: LazyTensor(contents[name].tensor, _reader_of(reader, name)) for name in names},
        reader.manifest.step,
        reader.text(training_state.FILE).get(_SCHEDULER),
        plain_order=reader.manifest.plain_order,
    )


def _reader_of(reader: StepReader, name: TensorName) -> Callable[[Region | None], np.ndarray]:
    """Returns the function by which a ``LazyTensor`` reads a region of a tensor of a step."""

    def read(cut: Region | None) -> np.ndarray:
        described: Described = reader.manifest.tensors[name].tensor
        shape = described.shape if cut is None else cut.part(described.shape)
        array = np.empty(shape, bits_dtype(described))
        with reader.opened() as read_into:
            read_into(name, cut, memory_of(array))
        return array

    return read


def write_step(state: Checkpoint, run_directory: Path, step: int) -> None:
    """Saves a checkpoint as a step of a run, with the random states of this process.

    Args:
        state: The checkpoint.
        run_directory: The run, which may be new.
        step: The number of the step.

    Raises:
        CheckpointError: The run has this step or later ones, or a tensor cannot be read.
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
    # As a job saves them; "extra" would have the values of a script.
    states = {"extra": {}, "random": training_state.random_states()}
    if state.scheduler is not None:
        states[_SCHEDULER] = state.scheduler
    merged = training_state.merge_states([states], [ranks.coordinates])
    plan = state.plan_of_files()
    text = training_state.to_text({"step": step, **merged})
    texts = {**indexes(plan), training_state.FILE: text}
    order, versions = (*state.of(MODEL),), {"fleetpipe": __version__, "paddle": VERSION}
    kinds = {name.rpartition("/")[2] for name in state.of(OPTIMIZER)}
    # No other format names the optimizer's type: libraries' Trainers use AdamW, if not Momentum.
    optimizer = "Momentum" if kinds == {"velocity_0"} else "AdamW" if kinds else None
    files = described_files(plan, texts)
    contents = Manifest(
        *(step, files, {}, order, optimizer, {}, ranks.layout, versions, state.plain_order)
    )
    is_new = not run_directory.exists()
    draft = run_folder.draft_of(run_directory, step, uuid.uuid4().hex[:8])
    try:
        draft.mkdir(parents=True)
        task = Assignment(Retention(run_directory), draft, plan, 0, 1, contents, texts)
        write(task, lambda name: memory_of(state.tensors[name].read()))
    except BaseException:
        run_folder.remove_left(run_directory if is_new else draft)
        raise


class Format(NamedTuple):
    """A format of checkpoints.

    Attributes:
        files: The files by which a folder of this format is recognized.
        is_there: Returns whether a folder has this format.
        read: Reads a folder; raises a ``CheckpointError`` if it is damaged.
        write: Fills an empty folder; raises a ``CheckpointError`` if a tensor cannot be read, and
            an ``OSError`` if a file cannot be written. None: :func:`write_step` adds a step to a
            run.
        groups: The groups of tensors that the format can store, such as "optimizer".
    """

    files: str
    is_there: Callable[[Path], bool]
    read: Callable[[Path], Checkpoint]
    write: Callable[[Checkpoint, Path], None] | None
    groups: tuple[str, ...] = _ALL_GROUPS


#: The formats by name, in the order in which a folder is tried: fleetpipe's has others' files too.
FORMATS = {
    FLEETPIPE: Format("manifest.json", is_checkpoint, read_step, None, tuple(GROUPS)),
    FLEET: Format(
        "layer_*-model_states.pdparams",
        lambda folder: any(folder.glob("layer_*-model_states.pdparams")),
        model_files.read_layer_files,
        model_files.write_layer_files,
        (MODEL,),
    ),
    "formers": Format(
        "model_state/*.metadata",
        *(distributed.is_formers, distributed.read_folder, distributed.write_formers),
    ),
    "distributed": Format(
        "*.metadata",
        *(distributed.is_distributed, distributed.read_folder, distributed.write_folder),
    ),
    "unified": Format(
        "optimizer.safetensors.index.json",
        model_files.is_unified,
        model_files.read_unified,
        model_files.write_unified,
    ),
    "huggingface": Format(
        "model.safetensors or model.safetensors.index.json",
        model_files.is_huggingface,
        model_files.read_huggingface,
        model_files.write_huggingface,
        (MODEL,),
    ),
    PRETRAINED: Format(
        model_files.STATE_FILE,
        lambda folder: (folder / model_files.STATE_FILE).is_file(),
        model_files.read_state_file,
        model_files.write_state_file,
        (MODEL,),
    ),
}


def format_of(folder: Path) -> str:
    """Returns the name of the format of a folder.

    Raises:
        CheckpointError: The folder has no known format.
    """
    present = [name for name, one in FORMATS.items() if folder.is_dir() and one.is_there(folder)]
    # A Trainer's folder may also have its model in safetensors or in PaddleNLP's file, as a copy,
    # and a unified checkpoint is a folder of safetensors.
    copies = (PRETRAINED, "huggingface" if "unified" in present else PRETRAINED)
    candidates = [name for name in present if name not in copies]
    if len(candidates) > 1 and present[0] not in (FLEETPIPE, "formers"):
        raise CheckpointError(
            "the folder has files of several checkpoints",
            where=str(folder),
            got="; ".join(f"{name}: {FORMATS[name].files}" for name in candidates),
            fix="say by --from or source_format= which is meant, or move the others away",
        )
    if present:
        return present[0]
    raise CheckpointError(
        "there is no checkpoint in this folder" if folder.is_dir() else "there is no such folder",
        where=str(folder),
        expected="; ".join(f"{name}: {one.files}" for name, one in FORMATS.items()),
        got="a file" if folder.is_file() else None,
        fix="pass the folder in which these files are, of one step; --from or source_format= says "
        "its format",
    )


def read_checkpoint(
    folder: Path, source_format: str, names: NameMap | None = None, step: int | None = None
) -> Checkpoint:
    """Reads a checkpoint, but not yet the values of its tensors.

    Args:
        folder: The folder of the checkpoint, or of a run of fleetpipe.
        source_format: The format of the checkpoint.
        names: The map that renames tensors.
        step: The step of a run; by default the newest.

    Raises:
        CheckpointError: The checkpoint is damaged, or has no tensors.
        ConfigError: The map of names does not fit.
    """
    if source_format == FLEETPIPE:
        state = read_step(folder, step)
    else:
        state = FORMATS[source_format].read(folder)
    if names is not None and state.tensors:
        try:
            state = rename(state.with_plain_names(), names)
        except FleetPipeError as error:
            error.add_place(names.file)
            raise
    if not state.tensors:
        raise CheckpointError(
            "the checkpoint has no tensors" + " that the map does not leave out" * bool(names),
            where=str(folder),
            fix="pass the folder of a step that has a model",
        )
    return state


def convert(
    source: Path,
    target: Path,
    *,
    to: str | None = None,
    source_format: str | None = None,
    names: NameMap | None = None,
    step: int | None = None,
) -> str:
    """Converts a checkpoint. The target appears when it is complete, or not at all.

    Args:
        source: The folder of a checkpoint, or of a run of fleetpipe.
        target: A folder that does not exist, or the folder of a run, to which a step is added.
        to: The format to write; None: Fleet's for a run of fleetpipe, fleetpipe's for others.
        source_format: The format to read; None recognizes it by the files.
        names: The map that renames tensors.
        step: The step of a run to read; for another source the number of the step to write.

    Returns:
        What was written and what was left out, in words.

    Raises:
        CheckpointError: The source is damaged, or the target exists.
        ConfigError: The map of names does not fit.
        OSError: A file cannot be written.
    """
    read_as = source_format or format_of(source)
    write_as = to or (FLEET if read_as == FLEETPIPE else FLEETPIPE)
    _require_free_target(source, target, write_as)
    if step is not None and step < 0:
        raise ConfigError(f"a step is a number of 0 or more (={step})", fix="give another --step")
    complete = read_checkpoint(source, read_as, names, step if read_as == FLEETPIPE else None)
    if write_as not in (FLEETPIPE, FLEET):
        complete = complete.with_plain_names()
    groups, write = FORMATS[write_as].groups, FORMATS[write_as].write
    tensors = {name: tensor for name, tensor in complete.tensors.items() if name.group in groups}
    state = replace(complete, tensors=tensors)
    if write is None:
        number = step if step is not None and read_as != FLEETPIPE else state.step or 0
        write_step(state, target, number)
        written = f"step {number} of {target}: {len(state.tensors)} tensors"
    else:
        with appearing(target) as draft:
            write(state, draft)
        written = f"{target}: {len(state.tensors)} tensors from {read_as} to {write_as}"
    left_out = [str(name) for name in complete.tensors if name not in tensors]
    if left_out:
        written += f"\nleft out, as {write_as} has no place for it: {join_names(left_out)}"
    return written


def _require_free_target(source: Path, target: Path, write_as: str) -> None:
    """Raises ``CheckpointError`` if files at the target would be written over or changed.

    Args:
        source: The folder that is read.
        target: The folder that will be written.
        write_as: The format of the target; if that is fleetpipe's, the target may exist.
    """
    is_empty = target.is_dir() and not any(target.glob("[!.]*"))
    takes_step = write_as == FLEETPIPE and (complete_steps(target) or is_empty)
    if os.path.lexists(target) and not takes_step:
        raise CheckpointError(
            "the target is there, and nothing is written over",
            where=str(target),
            expected="a folder that does not exist" + ", or a run" * (write_as == FLEETPIPE),
            fix="give a folder that does not exist",
        )
    if Path(os.path.realpath(source)) in Path(os.path.realpath(target)).parents:
        raise CheckpointError(
            "the target is within the source, in which nothing is changed",
            where=str(target),
            fix="give a folder outside of it",
        )


def write_parameters(folder: Path, target: Path) -> None:
    """Writes the model of a step of fleetpipe's into one file of ``paddle.save``.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        OSError: The file cannot be written.
    """
    model = read_step(folder).of(MODEL)
    fleet_files.save(target, {name: paddle_tensor(tensor) for name, tensor in model.items()})


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
            return StepReader(find_step(path)), objects
        state = read_checkpoint(path, read_as, renaming)
        return _ForeignStep(state, optimizer), _objects_to_load(objects, state)

    return restore_from(Ranks.of_job(), f"loading {path.name}", begin).step


def _objects_to_load(objects: Objects, state: Checkpoint) -> Objects:
    """Returns the objects to load, without the learning rate if the checkpoint has none."""
    if objects.optimizer is None or state.scheduler is not None:
        return objects
    if scheduler_of(unwrap(objects.optimizer)) is not None:
        once(
            _log.warning,
            "the checkpoint has no state of the learning rate's scheduler, which stays",
        )
    return replace(objects, rate=False)


class _ForeignStep:
    """Another program's checkpoint, with the methods by which ``restore_from`` reads a step.

    Such a checkpoint has no checksums.
    """

    def __init__(self, state: Checkpoint, optimizer: Optimizer | None) -> None:
        """Describes the tensors of ``state``, which ``optimizer`` will receive if there is one."""
        self._state = state
        entries = {name: Entry("", tensor.described, ()) for name, tensor in state.tensors.items()}
        kind = None
        if optimizer is not None and state.of(OPTIMIZER):
            # No other format names the type of the optimizer that was saved. It counts as that of
            # ``optimizer``: whether the two fit shows in the kinds of their tensors.
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
        """Returns the state that is not in tensors, as ``StepReader.text`` reads it from a file.

        Args:
            _name: The name of that file, ``training_state.FILE``, which such a checkpoint lacks.

        Returns:
            Under "extra" the values that the script saved, here none; under "lr_scheduler" the
            state of the learning rate's scheduler, if the checkpoint has one.
        """
        rate = {} if self._state.scheduler is None else {_SCHEDULER: self._state.scheduler}
        return {"extra": {}, **rate}

    def check_texts(self) -> None:
        """Does nothing: another program's files have no checksums."""

    def check(self, _groups: Collection[str], _share: int, _shares: int) -> None:
        """Checks no tensors: the indices of the files were compared when they were opened."""

    @contextmanager
    def opened(self) -> Iterator[Callable[[TensorName, Region | None, memoryview], None]]:
        """Yields ``read(name, cut, memory)``, which reads a tensor of the checkpoint into memory.

        ``cut`` is the region of the tensor to read, or None for the full tensor.
        """

        def read(name: TensorName, cut: Region | None, memory: memoryview) -> None:
            memory[:] = memory_of(np.ascontiguousarray(self._state.tensors[name].read(cut)))

        yield read
