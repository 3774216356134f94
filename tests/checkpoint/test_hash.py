"""One hash of a model: the same whoever computes it of whatever file, and what has none."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from safetensors.numpy import save_file

import fleetpipe
from fleetpipe.checkpoint.files import manifest
from fleetpipe.cli import main
from tests.fixtures import Capture
from tests.ground.test_without_paddle import without_paddle
from tests.launching import ROOT

#: The names of the plain lines in the guide.
PLAIN: dict[str, Any] = {"paddle": paddle}
_GUIDE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
exec(re.findall(r"^import hashlib\n.*?(?=^assert)", _GUIDE, re.DOTALL | re.MULTILINE)[0], PLAIN)


def model() -> nn.Layer:
    paddle.seed(4)
    layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1D(3), nn.Linear(3, 2), nn.Linear(2, 3))
    layers[2].to(dtype="bfloat16")
    layers.register_buffer("count", paddle.to_tensor(7))
    layers.register_buffer("seen", paddle.zeros([0, 2]))
    return layers


def said(capsys: Capture, *words: object, code: int = 0) -> str:
    assert main(["hash", *map(str, words)]) == code
    output = capsys.readouterr()
    return output.err if code else output.out


def test_every_file_of_a_model_has_the_hash_that_plain_python_computes(
    tmp_path: Path, capsys: Capture
) -> None:
    layers, run, file = model(), tmp_path / "run", tmp_path / "plain.pdparams"
    paddle.save(layers.state_dict(), str(file))
    expected = PLAIN["state_hash"](str(file))
    assert fleetpipe.model_hash(layers) == expected
    fleetpipe.CheckpointManager(run).save(1, model=layers)
    assert manifest.read(run / "step-00000001").model_hash == expected
    assert main(["checkpoint", "merge", str(run), str(tmp_path / "all.safetensors")]) == 0
    capsys.readouterr()
    for name in ("plain.pdparams", "all.safetensors", "run", "run/step-00000001"):
        assert said(capsys, tmp_path / name) == f"{expected}  {tmp_path / name}\n"
    shown = said(capsys, "--by-name", file).splitlines(keepends=True)
    assert [line.split()[1] for line in shown[:2]] == ["0.bias", "0.weight"]
    lines = "".join(shown[:-1]).encode()
    assert PLAIN["hashlib"].sha256(lines).hexdigest() == expected


def test_several_models_are_compared(tmp_path: Path, capsys: Capture) -> None:
    layers = model()
    state = layers.state_dict()
    changed = {**state, "2.bias": state["2.bias"] + 1}
    other_names = {f"model.{name}": tensor for name, tensor in state.items()}
    paths = [str(tmp_path / f"{name}.pdparams") for name in "abcde"]
    states = (state, changed, state, other_names, {"0.bias": state["2.bias"]})
    for path, contents in zip(paths, states):
        paddle.save(contents, path)
    a, b, c, d, e = paths
    assert said(capsys, *paths).splitlines()[5:] == [
        f"{b}: not the model of {a}: '2.bias' differs first, 1 of 12 tensors",
        f"{c}: the same model as {a}",
        f"{d}: the same values as {a}, under other names",
        f"{e}: not the model of {a}: 'count' is in one of them alone, 12 of 12 tensors",
    ]


def evil(path: Path) -> None:
    path.write_bytes(pickle.dumps(Evil()))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def torn(path: Path) -> None:
    """A checkpoint of which a file has lost its end."""
    fleetpipe.CheckpointManager(path).save(1, model=model())
    file = path / "step-00000001/model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def without_index(path: Path) -> None:
    """One of two parts of a model, and nothing that says so."""
    path.mkdir()
    save_file({"a": np.zeros(1)}, path / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("name", "make", "hint"),
    [
        ("missing", lambda path: None, "there is no such file or folder"),
        ("a\0b", lambda path: None, "there is no such file or folder"),
        ("empty", Path.mkdir, "there is no checkpoint in this folder"),
        ("run", torn, "model-00001-of-00001.safetensors is damaged"),
        ("parts", without_index, "there is no model.safetensors.index.json"),
        (
            "model-00002-of-00002.safetensors",
            lambda path: save_file({"a": np.zeros(1)}, path),
            "one of 2 parts of a model",
        ),
        ("a.safetensors", lambda path: save_file({"a\0b": np.zeros(1)}, path), "named 'a\\x00b'"),
        ("none.safetensors", lambda path: save_file({}, path), "got: no tensor"),
        ("text.safetensors", lambda path: path.write_text("text" * 9), "is damaged"),
        ("evil.pdparams", evil, "nothing of it was run or loaded"),
        (
            "adam.pdopt",
            lambda path: paddle.save({"LR_Scheduler": {"last_epoch": 1}}, str(path)),
            "values that are no tensors: LR_Scheduler",
        ),
    ],
)
def test_what_has_no_hash(
    name: str,
    make: Callable[[Path], object],
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    assert hint in said(capsys, tmp_path / name, code=2)
    assert not (tmp_path / "ran").exists()


def test_checkpoints_and_safetensors_need_no_paddle(tmp_path: Path) -> None:
    fleetpipe.CheckpointManager(tmp_path / "run").save(1, model=model())
    (file,) = tmp_path.glob("run/*/model*.safetensors")
    words = ["hash", str(tmp_path / "run"), str(file)]
    done = without_paddle(f"from fleetpipe.cli import main\nassert main({words}) == 0")
    assert done.stdout.endswith(f"{file}: the same model as {words[1]}\n"), done.stderr
