"""Fleet's layer files, ``layer_00-tensor_00-model_states.pdparams``, which store a model only."""

from __future__ import annotations

import re
from pathlib import Path

from fleetpipe import fleet_files
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.contrib.formats.contents import (
    Checkpoint,
    LazyTensor,
    lazy_array,
    paddle_tensor,
)
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet_files import manifest
from fleetpipe.fleet_files.layers import LayerFile

_NAME = re.compile(r"(?P<layer>\d+)\.(?P<name>.+)")


def is_there(folder: Path) -> bool:
    """Whether a folder has such files."""
    return any(folder.glob("layer_*-model_states.pdparams"))


def read_folder(folder: Path) -> Checkpoint:
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


def write_folder(state: Checkpoint, folder: Path) -> None:
    """Writes a model without shared layers; each layer has a file, even without parameters.

    Raises:
        CheckpointError: The model has shared layers, or other names than a list of layers; or a
            tensor cannot be read.
        OSError: A file cannot be written.
    """
    layers: dict[int, dict[str, LazyTensor]] = {}
    for name, tensor in state.of(MODEL).items():
        match = _NAME.fullmatch(name)
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
