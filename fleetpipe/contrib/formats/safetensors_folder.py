"""Folders of safetensors with an index: Hugging Face's, and unified checkpoints.

Unified checkpoints, of PaddleNLP and PaddleFormers, also have the optimizer and master weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from fleetpipe.checkpoint.contents.parts import MASTER_WEIGHTS, MODEL, OPTIMIZER, TensorName
from fleetpipe.checkpoint.files import tensors
from fleetpipe.checkpoint.files.plan import Holding, Inventory, indexes, plan_files
from fleetpipe.contrib.formats.contents import (
    SCHEDULER,
    Checkpoint,
    LazyTensor,
    join_names,
    memory_of,
    other_files,
    scheduler_in,
    stored_tensor,
    write_rest,
)
from fleetpipe.errors import CheckpointError, is_file_name
from fleetpipe.json_value import JsonValue, Source, read

GROUPS = (MODEL, OPTIMIZER, MASTER_WEIGHTS)
_INDEX = ".safetensors.index.json"
_TRAINER = "trainer_state.json"
_SOURCE = Source(
    "this is no index of safetensors files",
    CheckpointError,
    "copy it again from where it was saved",
)


def is_there(folder: Path) -> bool:
    """Whether a folder has a model in safetensors."""
    return any([*folder.glob(f"{MODEL}{_INDEX}"), *folder.glob(f"{MODEL}*.safetensors")])


def is_unified(folder: Path) -> bool:
    """Whether the folder also has an optimizer."""
    return is_there(folder) and any(folder.glob(f"{OPTIMIZER}*.safetensors*"))


def read_folder(folder: Path) -> Checkpoint:
    """Reads the indices and headers.

    Raises:
        CheckpointError: One is damaged, or they do not agree; the message names the file.
    """
    contents = {TensorName(g, name): one for g in GROUPS for name, one in _group(folder, g).items()}
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
    rest = other_files(folder, "*.safetensors", f"*{_INDEX}", SCHEDULER)
    return Checkpoint(contents, step, scheduler_in(folder), rest, _sorted_names(contents))


def _sorted_names(contents: Mapping[TensorName, LazyTensor]) -> tuple[str, ...]:
    """Returns the model's names if they are sorted, else none; an index or a dtype sorts them.

    Then their order says nothing about the order in the model.
    """
    model = {n.name: -one.described.itemsize for n, one in contents.items() if n.group == MODEL}
    in_order = [*model] in (sorted(model), sorted(model, key=lambda name: (model[name], name)))
    return tuple(model) if in_order else ()


def read_model(folder: Path) -> Checkpoint:
    """Reads the model only.

    Raises:
        CheckpointError: An error of :func:`read_folder`.
    """
    contents = {TensorName(MODEL, name): one for name, one in _group(folder, MODEL).items()}
    rest = other_files(folder, "*.safetensors", f"*{_INDEX}")
    return Checkpoint(contents, None, None, rest, _sorted_names(contents))


def _group(folder: Path, group: str) -> dict[str, LazyTensor]:
    index, single = folder / f"{group}{_INDEX}", folder / f"{group}.safetensors"
    if index.is_file():
        places = read(index, _SOURCE, _weight_map)
    elif single.is_file():
        places = dict.fromkeys(_layout(single, folder).tensors, single.name)
    elif parts := sorted(folder.glob(f"{group}-*.safetensors")):
        raise CheckpointError(
            f"there is no {index.name}, which says what files of the {group} belong together",
            where=str(folder),
            got=join_names([part.name for part in parts]),
            fix="copy it too from where it was saved",
        )
    else:
        return {}
    layouts = {file: _layout(folder / file, index) for file in dict.fromkeys(places.values())}
    for name, file in places.items():
        if name not in layouts[file].tensors:
            raise tensors.damage(folder / file, f"no tensor {name!r}, which {index.name} has there")
    unlisted = [n for f, layout in layouts.items() for n in layout.tensors if places.get(n) != f]
    if unlisted:
        raise tensors.damage(index, f"no place for {join_names(unlisted)}, which its files hold")
    return {
        name: stored_tensor(folder / file, layouts[file].tensors[name])
        for name, file in places.items()
    }


def _weight_map(index: JsonValue) -> dict[str, str]:
    quantized = index.get("ckpt_quant_stage")
    if quantized is not None and quantized.content != "O0":
        raise quantized.refused("an optimizer that is not quantized")
    places = {name: file.text() for name, file in index["weight_map"].fields().items()}
    if not places:
        raise index["weight_map"].refused("names of tensors")
    if not all(map(is_file_name, places.values())):
        raise index["weight_map"].refused("names of files of the folder")
    return places


def _layout(path: Path, index: Path) -> tensors.Layout:
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
    _write(state, folder, "np")
    write_rest(state, folder)


def write_huggingface(state: Checkpoint, folder: Path) -> None:
    """Writes a model for libraries on PyTorch; a map supplies their names and shapes."""
    _write(state, folder, "pt")
    for file in state.files:
        if file.suffix == ".json" and file.name != _TRAINER:
            shutil.copy2(file, folder)


def _write(state: Checkpoint, folder: Path, made_by: str) -> None:
    holdings = {
        name: Holding(tensor.described, None, False) for name, tensor in state.tensors.items()
    }
    plan = plan_files([Inventory(holdings)])
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
