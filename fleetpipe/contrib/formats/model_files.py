"""Reads and writes models in the files of other libraries.

They are Fleet's layer files and PaddleNLP's state files, both of ``paddle.save``, and folders of
safetensors: Hugging Face's, and unified checkpoints, which have an optimizer too.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.checkpoint.contents.parts import MASTER_WEIGHTS, MODEL, OPTIMIZER, TensorName
from fleetpipe.checkpoint.files import tensors
from fleetpipe.checkpoint.files.tensors import indexes
from fleetpipe.contrib.formats.contents import (
    SCHEDULER,
    Checkpoint,
    LazyTensor,
    join_names,
    lazy_array,
    lazy_stored_tensor,
    memory_of,
    other_files,
    paddle_tensor,
    scheduler_in,
    write_scheduler_and_files,
)
from fleetpipe.errors import CheckpointError, is_file_name, listed
from fleetpipe.fleet_files import manifest
from fleetpipe.fleet_files.manifest import LayerFile
from fleetpipe.json_value import JsonValue, Source, read

STATE_FILE = "model_state.pdparams"
_LAYER_NAME = re.compile(r"(?P<layer>\d+)\.(?P<name>.+)")

#: The groups of tensors of a unified checkpoint.
_GROUPS = (MODEL, OPTIMIZER, MASTER_WEIGHTS)
#: What follows the group in the name of an index, which says in which file each tensor is.
_INDEX = ".safetensors.index.json"
#: The file in which the Trainers of libraries write their step.
_TRAINER = "trainer_state.json"
_SOURCE = Source(
    "this is no index of safetensors files",
    CheckpointError,
    "copy it again from where it was saved",
)


def read_layer_files(folder: Path) -> Checkpoint:
    """Reads the names and shapes of the tensors in Fleet's layer files.

    Raises:
        CheckpointError: A file cannot be read, or has a shard of its layer.
    """
    contents: dict[TensorName, LazyTensor] = {}
    saved = manifest.newest_save_in(folder)
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
    """Writes Fleet's layer files: one for each layer, even without parameters.

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
        state_dict = {name: paddle_tensor(one) for name, one in layers.get(layer, {}).items()}
        fleet_files.save(folder / LayerFile(layer).name, state_dict)


def read_state_file(folder: Path) -> Checkpoint:
    """Reads the names and shapes of the tensors in PaddleNLP's state file.

    Raises:
        CheckpointError: The file cannot be read.
    """
    return replace(read_state_dict(folder / STATE_FILE), files=other_files(folder, STATE_FILE))


def read_state_dict(path: Path) -> Checkpoint:
    """Reads the names and shapes in any file into which ``paddle.save`` wrote a state dict.

    Raises:
        CheckpointError: The file cannot be read, or has values that are no tensors.
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
    """Writes PaddleNLP's state file, and copies the JSON files of the source."""
    tensors = {name: paddle_tensor(tensor) for name, tensor in state.of(MODEL).items()}
    fleet_files.save(folder / STATE_FILE, tensors)
    for file in state.files:
        if file.suffix == ".json":
            shutil.copy2(file, folder)


def is_huggingface(folder: Path) -> bool:
    """Returns whether a folder has a model in safetensors."""
    return any([*folder.glob(f"{MODEL}{_INDEX}"), *folder.glob(f"{MODEL}*.safetensors")])


def is_unified(folder: Path) -> bool:
    """Returns whether a folder has a model and an optimizer in safetensors."""
    return is_huggingface(folder) and any(folder.glob(f"{OPTIMIZER}*.safetensors*"))


def read_unified(folder: Path) -> Checkpoint:
    """Reads the indices and headers of the safetensors files: model, optimizer, master weights.

    Raises:
        CheckpointError: A file is damaged, or files contradict each other; the message names it.
    """
    contents = {
        TensorName(group, name): tensor
        for group in _GROUPS
        for name, tensor in _read_group(folder, group).items()
    }
    for name, tensor in contents.items():
        parameter = contents.get(TensorName(MODEL, name.name.rpartition("/")[0]), tensor)
        if "moment" in name.name and parameter.described.shape != tensor.described.shape:
            raise CheckpointError(
                f"{name} has another shape than its parameter",
                where=str(folder),
                expected=str(parameter.described),
                got=str(tensor.described),
                cause="the Trainer stored the model for Hugging Face and the optimizer for Paddle",
                fix="train with --save_to_hf false; --from huggingface reads the model alone",
            )
    step = None
    if (folder / _TRAINER).is_file():
        source = _SOURCE._replace(summary=f"{_TRAINER} is not what a Trainer writes")
        step = read(folder / _TRAINER, source, lambda value: value["global_step"].count())
    files = other_files(folder, "*.safetensors", f"*{_INDEX}", SCHEDULER)
    return Checkpoint(contents, step, scheduler_in(folder), files, _names_if_sorted(contents))


def _names_if_sorted(contents: Mapping[TensorName, LazyTensor]) -> tuple[str, ...]:
    """Returns a checkpoint's ``plain_order``: the model's names if they are sorted, else nothing.

    Libraries sort names alphabetically, or by the size of an element first. Sorted names say
    nothing of the order of the layers.
    """
    model = {
        name.name: -tensor.described.itemsize
        for name, tensor in contents.items()
        if name.group == MODEL
    }
    is_sorted = [*model] in (sorted(model), sorted(model, key=lambda name: (model[name], name)))
    return tuple(model) if is_sorted else ()


def read_huggingface(folder: Path) -> Checkpoint:
    """Reads the indices and headers of the model's files; leaves out an optimizer.

    Raises:
        CheckpointError: A file is damaged, or files contradict each other.
    """
    tensors_by_name = _read_group(folder, MODEL)
    contents = {TensorName(MODEL, name): tensor for name, tensor in tensors_by_name.items()}
    files = other_files(folder, "*.safetensors", f"*{_INDEX}")
    return Checkpoint(contents, None, None, files, _names_if_sorted(contents))


def _read_group(folder: Path, group: str) -> dict[str, LazyTensor]:
    """Returns the tensors of a group by name, from one file or from those of an index.

    Raises:
        CheckpointError: The index is missing or damaged, or does not fit its files.
    """
    index, single = folder / f"{group}{_INDEX}", folder / f"{group}.safetensors"
    if index.is_file():
        file_of = read(index, _SOURCE, _parse_weight_map)
    elif single.is_file():
        file_of = dict.fromkeys(_read_layout(single, folder).tensors, single.name)
    elif parts := sorted(folder.glob(f"{group}-*.safetensors")):
        raise CheckpointError(
            f"there is no {index.name}, which says what files of the {group} belong together",
            where=str(folder),
            got=join_names([part.name for part in parts]),
            fix="copy it too from where it was saved",
        )
    else:
        return {}
    layouts = {file: _read_layout(folder / file, index) for file in dict.fromkeys(file_of.values())}
    for name, file in file_of.items():
        if name not in layouts[file].tensors:
            raise tensors.damage(folder / file, f"no tensor {name!r}, which {index.name} has there")
    unlisted = [n for f, layout in layouts.items() for n in layout.tensors if file_of.get(n) != f]
    if unlisted:
        raise tensors.damage(index, f"no place for {join_names(unlisted)}, which its files hold")
    return {
        name: lazy_stored_tensor(folder / file, layouts[file].tensors[name])
        for name, file in file_of.items()
    }


def _parse_weight_map(index: JsonValue) -> dict[str, str]:
    """Returns the name of the file that has each tensor, from the content of an index."""
    quantized = index.get("ckpt_quant_stage")
    if quantized is not None and quantized.content != "O0":
        raise quantized.refused("an optimizer that is not quantized")
    file_of = {name: file.text() for name, file in index["weight_map"].fields().items()}
    if not file_of:
        raise index["weight_map"].refused("names of tensors")
    if not all(map(is_file_name, file_of.values())):
        raise index["weight_map"].refused("names of files of the folder")
    return file_of


def _read_layout(path: Path, index: Path) -> tensors.Layout:
    """Reads the header of a safetensors file that ``index``, a file or the folder, names."""
    try:
        return tensors.read_layout(path)
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read, which {index.name} names",
            where=str(path),
            got=str(error),
            fix="copy the whole folder from where it was saved",
        ) from error


def write_unified(state: Checkpoint, folder: Path) -> None:
    """Writes a unified checkpoint for PaddleNLP and PaddleFormers."""
    _write_safetensors(state, folder, "np")
    write_scheduler_and_files(state, folder)


def write_huggingface(state: Checkpoint, folder: Path) -> None:
    """Writes a model for libraries on PyTorch; names and shapes are those of the checkpoint."""
    _write_safetensors(state, folder, "pt")
    for file in state.files:
        if file.suffix == ".json" and file.name != _TRAINER:
            shutil.copy2(file, folder)


def _write_safetensors(state: Checkpoint, folder: Path, made_by: str) -> None:
    """Writes safetensors files and their indices.

    Args:
        state: The checkpoint.
        folder: The folder to write into.
        made_by: The library that the files name as their origin: "np" or "pt", for PyTorch.
    """
    plan = state.plan_of_files()
    for group, files in plan.groups.items():
        for name in files:
            layout = tensors.layout_of(
                {n: one.tensor for n, one in plan.files[name].tensors.items()}, made_by
            )
            with FileIO(str(folder / name), "w") as file:
                tensors.write_at(file, 0, layout.header)
                for tensor_name, stored in layout.tensors.items():
                    array = state.tensors[TensorName(group, tensor_name)].read()
                    tensors.write(file, stored, None, memory_of(array))
    for name, text in indexes(plan).items():
        index = json.loads(text)
        order = [n for n in state.of(name.removesuffix(_INDEX)) if n in index["weight_map"]]
        index["weight_map"] = {n: index["weight_map"][n] for n in order}
        (folder / name).write_text(json.dumps(index, indent=1), encoding="utf-8")
