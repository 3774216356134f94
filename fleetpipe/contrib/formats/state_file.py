"""``model_state.pdparams``: a model's state dict, as PaddleNLP's ``save_pretrained`` writes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from fleetpipe import fleet_files
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.contrib.formats.contents import (
    Checkpoint,
    lazy_array,
    other_files,
    paddle_tensor,
)

FILE = "model_state.pdparams"


def is_there(folder: Path) -> bool:
    """Whether a folder has such a file."""
    return (folder / FILE).is_file()


def read_folder(folder: Path) -> Checkpoint:
    """Reads the index of the file.

    Raises:
        CheckpointError: It cannot be read.
    """
    path = folder / FILE
    contents = fleet_files.mapped(path).items()
    tensors = {TensorName(MODEL, name): lazy_array(path, array) for name, array in contents}
    return Checkpoint(tensors, files=other_files(folder, FILE))


def write_folder(state: Checkpoint, folder: Path) -> None:
    """Writes a model, and copies of the JSON files that were with it.

    Raises:
        CheckpointError: A tensor cannot be read.
        OSError: A file cannot be written.
    """
    tensors = {name: paddle_tensor(tensor) for name, tensor in state.of(MODEL).items()}
    fleet_files.save(folder / FILE, tensors)
    for file in state.files:
        if file.suffix == ".json":
            shutil.copy2(file, folder)
