"""Models in files of ``paddle.save``: Fleet's layer files, and PaddleNLP's ``save_pretrained``.

Fleet writes a file for each layer, ``layer_00-tensor_00-model_states.pdparams``; PaddleNLP one
state dict, ``model_state.pdparams``.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.contrib.formats.contents import (
    Checkpoint,
    LazyTensor,
    lazy_array,
    other_files,
    paddle_tensor,
)
from fleetpipe.errors import CheckpointError, listed
from fleetpipe.fleet_files import manifest
from fleetpipe.fleet_files.layers import LayerFile

STATE_FILE = "model_state.pdparams"
_LAYER_NAME = re.compile(r"(?P<layer>\d+)\.(?P<name>.+)")


def has_layer_files(folder: Path) -> bool:
    """Whether a folder has such files."""
    return any(folder.glob("layer_*-model_states.pdparams"))


def read_layer_files(folder: Path) -> Checkpoint:
    """Reads the indices of the files.

    Raises:
        CheckpointError: A file cannot be read, or holds a shard of its layer.
    """
    contents: dict[TensorName, LazyTensor] = {}
    saved = manifest.save_in(folder)
    files = [
        (file.number, saved.path(name), file.shard)
        for name in saved.paths
        if (file := LayerFile.parse(name))
    ]
    for number, path, shard in sorted(files):
        if shard:
            raise CheckpointError(
                "files of shards do not say how their layers were cut",
                where=str(path),
                fix="load them in a job of the same mp_degree by layers.set_state_dir(folder), "
                "then save with a CheckpointManager",
            )
        saved.require(path.name)
        for name, array in fleet_files.mapped(path).items():
            full = TensorName(MODEL, f"{number}.{name}")
            if full in contents:
                raise CheckpointError(
                    f"two files have {full}",
                    where=str(path),
                    cause="the folder has the files of two saves, with other numbers of chunks",
                    fix="move the files of one of them away",
                )
            contents[full] = lazy_array(path, array)
    return Checkpoint(contents)


def write_layer_files(state: Checkpoint, folder: Path) -> None:
    """Writes a model without shared layers; each layer has a file, even without parameters.

    Raises:
        CheckpointError: The model has shared layers, or other names than a list of layers; or a
            tensor cannot be read.
        OSError: A file cannot be written.
    """
    layers: dict[int, dict[str, LazyTensor]] = {}
    for name, tensor in state.of(MODEL).items():
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{name!r} belongs to no single layer of a list",
                cause="the layer is shared by several entries, or the model is not a PipelineLayer",
                fix="restore the checkpoint in a job, then layers.save_state_dict(folder)",
            )
        layers.setdefault(int(match["layer"]), {})[match["name"]] = tensor
    for layer in range(max(layers, default=-1) + 1):
        read = {name: paddle_tensor(tensor) for name, tensor in layers.get(layer, {}).items()}
        fleet_files.save(folder / LayerFile(layer).name, read)


def is_state_file(folder: Path) -> bool:
    """Whether a folder has such a file."""
    return (folder / STATE_FILE).is_file()


def read_state_file(folder: Path) -> Checkpoint:
    """Reads the index of the file.

    Raises:
        CheckpointError: It cannot be read.
    """
    return replace(read_state_dict(folder / STATE_FILE), files=other_files(folder, STATE_FILE))


def read_state_dict(path: Path) -> Checkpoint:
    """Reads the index of any file of a state dict.

    Raises:
        CheckpointError: It cannot be read, or holds more than tensors.
    """
    contents = fleet_files.mapped(path)
    foreign = [str(name) for name, value in contents.items() if not isinstance(value, np.ndarray)]
    if foreign:
        raise CheckpointError(
            f"{path.name} is not a model's state dict",
            where=str(path),
            got=f"values that are no tensors: {listed(foreign)}",
            fix="pass the file of model.state_dict() or full_state_dict()",
        )
    return Checkpoint({TensorName(MODEL, n): lazy_array(path, a) for n, a in contents.items()})


def write_state_file(state: Checkpoint, folder: Path) -> None:
    """Writes a model, and copies of the JSON files that were with it."""
    tensors = {name: paddle_tensor(tensor) for name, tensor in state.of(MODEL).items()}
    fleet_files.save(folder / STATE_FILE, tensors)
    for file in state.files:
        if file.suffix == ".json":
            shutil.copy2(file, folder)
