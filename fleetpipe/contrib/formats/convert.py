"""Converts a checkpoint of any format to any other, with the table of formats."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fleetpipe import fleet_files
from fleetpipe.atomic_file import appearing
from fleetpipe.checkpoint.contents.parts import GROUPS, MASTER_WEIGHTS, MODEL, OPTIMIZER
from fleetpipe.checkpoint.files.run_folder import complete_steps, is_checkpoint
from fleetpipe.contrib.formats import (
    distributed,
    paddle_files,
    run,
    safetensors_folder,
)
from fleetpipe.contrib.formats.contents import Checkpoint, join_names, paddle_tensor
from fleetpipe.contrib.formats.name_map import NameMap, read_map, rename
from fleetpipe.errors import CheckpointError, ConfigError, FleetPipeError

FLEETPIPE, FLEET, PRETRAINED = "fleetpipe", "fleet", "pretrained"
_TRAINED = (MODEL, OPTIMIZER, MASTER_WEIGHTS)


class Format(NamedTuple):
    """A format of checkpoints.

    Attributes:
        files: The files by which it is recognized.
        is_there: Returns whether a folder has this format.
        read: Reads a folder; raises a ``CheckpointError`` if it is damaged.
        write: Fills an empty folder; raises a ``CheckpointError`` if a tensor cannot be read, and
            an ``OSError`` if a file cannot be written.
        groups: The groups of tensors that it can store.
    """

    files: str
    is_there: Callable[[Path], bool]
    read: Callable[[Path], Checkpoint]
    write: Callable[[Checkpoint, Path], None] | None
    groups: tuple[str, ...] = _TRAINED


#: By name, in the order in which a folder is looked at: fleetpipe's has files of others in it.
FORMATS = {
    FLEETPIPE: Format("manifest.json", is_checkpoint, run.read_step, None, tuple(GROUPS)),
    FLEET: Format(
        "layer_*-model_states.pdparams",
        paddle_files.has_layer_files,
        paddle_files.read_layer_files,
        paddle_files.write_layer_files,
        (MODEL,),
    ),
    "formers": Format(
        "model_state/*.metadata",
        *(distributed.is_formers, distributed.read_folder, distributed.write_formers),
    ),
    "distributed": Format(
        "*.metadata",
        *(distributed.is_there, distributed.read_folder, distributed.write_folder),
    ),
    "unified": Format(
        "optimizer.safetensors.index.json",
        safetensors_folder.is_unified,
        safetensors_folder.read_folder,
        safetensors_folder.write_unified,
    ),
    "huggingface": Format(
        "model.safetensors or model.safetensors.index.json",
        safetensors_folder.is_there,
        safetensors_folder.read_model,
        safetensors_folder.write_huggingface,
        (MODEL,),
    ),
    PRETRAINED: Format(
        paddle_files.STATE_FILE,
        paddle_files.is_state_file,
        paddle_files.read_state_file,
        paddle_files.write_state_file,
        (MODEL,),
    ),
}


def format_of(folder: Path) -> str:
    """Returns the name of the format of a folder.

    Raises:
        CheckpointError: The folder has no known format.
    """
    there = [name for name, one in FORMATS.items() if folder.is_dir() and one.is_there(folder)]
    # A Trainer's folder may have its model in safetensors as well, and a unified one is of them.
    # The file of PaddleNLP, which is the last, may be another copy of the model.
    lesser = (PRETRAINED, "huggingface" if "unified" in there else PRETRAINED)
    alike = [name for name in there if name not in lesser]
    if len(alike) > 1 and there[0] not in (FLEETPIPE, "formers"):
        raise CheckpointError(
            "the folder has files of several checkpoints",
            where=str(folder),
            got="; ".join(f"{name}: {FORMATS[name].files}" for name in alike),
            fix="say by --from or source_format= which is meant, or move the others away",
        )
    if there:
        return there[0]
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
    """Reads a checkpoint except for the values of its tensors.

    Args:
        folder: The folder of the checkpoint, or of a run of fleetpipe.
        source_format: The format of the checkpoint.
        names: The map that renames tensors.
        step: The step of a run; by default the newest.

    Raises:
        CheckpointError: It is damaged, or has no tensors.
        ConfigError: The map of names does not fit.
    """
    if source_format == FLEETPIPE:
        state = run.read_step(folder, step)
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
    """Converts a checkpoint. The target appears whole, or not at all.

    Args:
        source: The folder of a checkpoint, or of a run of fleetpipe.
        target: A folder that does not exist, or the folder of a run, to which a step is added.
        to: The format to write; None: Fleet's for a run of fleetpipe, fleetpipe's for others.
        source_format: The format to read; None: the one that the folder has.
        names: The map that renames tensors.
        step: The step of a run to read; or the number of the new step, if fleetpipe's format is
            written.

    Returns:
        Sentences about what was written and what was left out.

    Raises:
        CheckpointError: The source is damaged, or the target exists.
        ConfigError: The map of names does not fit.
        OSError: A file cannot be written.
    """
    read_as = source_format or format_of(source)
    write_as = to or (FLEET if read_as == FLEETPIPE else FLEETPIPE)
    _require_free(source, target, write_as)
    if step is not None and step < 0:
        raise ConfigError(f"a step is a number of 0 or more (={step})", fix="give another --step")
    whole = read_checkpoint(source, read_as, names, step if read_as == FLEETPIPE else None)
    if write_as not in (FLEETPIPE, FLEET):
        whole = whole.with_plain_names()
    groups, write = FORMATS[write_as].groups, FORMATS[write_as].write
    state = replace(whole, tensors={n: t for n, t in whole.tensors.items() if n.group in groups})
    if write is None:
        number = step if step is not None and read_as != FLEETPIPE else state.step or 0
        run.write_step(state, target, number)
        written = f"step {number} of {target}: {len(state.tensors)} tensors"
    else:
        with appearing(target) as draft:
            write(state, draft)
        written = f"{target}: {len(state.tensors)} tensors from {read_as} to {write_as}"
    left_out = [str(name) for name in whole.tensors if name not in state.tensors]
    if left_out:
        written += f"\nleft out, as {write_as} has no place for it: {join_names(left_out)}"
    return written


def _require_free(source: Path, target: Path, write_as: str) -> None:
    """Raises ``CheckpointError`` if the target has files that a checkpoint would mix with."""
    run_or_empty = complete_steps(target) or (target.is_dir() and not any(target.glob("[!.]*")))
    if os.path.lexists(target) and not (write_as == FLEETPIPE and run_or_empty):
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
    model = run.read_step(folder).of(MODEL)
    fleet_files.save(target, {name: paddle_tensor(tensor) for name, tensor in model.items()})


__all__ = ["FORMATS", "Format", "convert", "format_of", "read_map", "write_parameters"]
