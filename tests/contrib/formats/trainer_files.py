"""What a Trainer writes, and the command that converts it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn
from safetensors.numpy import load_file, save_file

from fleetpipe.cli import main


def convert(*words: object, code: int = 0) -> None:
    assert main(["checkpoint", "convert", *map(str, words)]) == code


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    convert(*words, code=2)
    return capsys.readouterr().err


def write_unified(folder: Path, groups: dict[str, dict[str, np.ndarray]]) -> Path:
    """As a Trainer of PaddleNLP writes it."""
    folder.mkdir()
    for group, arrays in groups.items():
        file = f"{group}-00001-of-00001.safetensors"
        save_file(arrays, folder / file, metadata={"format": "np"})
        index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(arrays, file)}
        (folder / f"{group}.safetensors.index.json").write_text(json.dumps(index))
    (folder / "trainer_state.json").write_text('{"global_step": 7}')
    paddle.save({"last_epoch": 7, "last_lr": 0.1}, str(folder / "scheduler.pdparams"))
    return folder


def map_file(folder: Path, *statements: str) -> Path:
    """A map of names with these statements."""
    path = folder / "names.json"
    path.write_text(json.dumps({"aoa_statements": statements}))
    return path


def trained() -> tuple[nn.Layer, paddle.optimizer.Optimizer]:
    """A model and an optimizer, before the first step."""
    paddle.seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return model, paddle.optimizer.AdamW(0.1, parameters=model.parameters())


def step(model: nn.Layer, optimizer: paddle.optimizer.Optimizer) -> None:
    model(paddle.arange(8.0).reshape([2, 4])).pow(2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()


def arrays(folder: Path) -> dict[str, bytes]:
    """Returns all tensors of a unified checkpoint, by the library."""
    return {
        f"{file.name.split('-')[0]} {name}": array.tobytes() + str(array.shape).encode()
        for file in folder.glob("*.safetensors")
        for name, array in load_file(file).items()
    }
