"""``model_state.pdparams``: a model's state dict, as PaddleNLP's ``save_pretrained`` writes it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from fleetpipe import fleet_files
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.contrib.formats.contents import (
    Checkpoint,
    lazy_array,
    other_files,
    paddle_tensor,
)
from fleetpipe.errors import CheckpointError, listed

FILE = "model_state.pdparams"


def is_there(folder: Path) -> bool:
    """Whether a folder has such a file."""
    return (folder / FILE).is_file()


def read_folder(folder: Path) -> Checkpoint:
    """Reads the index of the file.

    Raises:
        CheckpointError: It cannot be read.
    """
    return replace(read_file(folder / FILE), files=other_files(folder, FILE))


def read_file(path: Path) -> Checkpoint:
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


def write_folder(state: Checkpoint, folder: Path) -> None:
    """Writes a model, and copies of the JSON files that were with it."""
    tensors = {name: paddle_tensor(tensor) for name, tensor in state.of(MODEL).items()}
    fleet_files.save(folder / FILE, tensors)
    for file in state.files:
        if file.suffix == ".json":
            shutil.copy2(file, folder)
