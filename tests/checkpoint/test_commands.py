"""``fleetpipe checkpoint``: what it tells of a run, and the files that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn
from safetensors.numpy import load_file

import fleetpipe
from fleetpipe.checkpoint.files import manifest, run_folder
from fleetpipe.checkpoint.files.reader import StepReader
from fleetpipe.cli import main
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.fixtures import Capture
from tests.ground.test_without_paddle import without_paddle
from tests.pipelines import bits, job, mlp_layers, pipeline


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run of two steps, whose second one has another bias in its last layer."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    adam = paddle.optimizer.Adam(parameters=model.parameters())
    for parameter in model.parameters():
        parameter.set_value(paddle.full(parameter.shape, 0.5))
        parameter.grad = paddle.ones(parameter.shape)
    adam.step()
    manager = fleetpipe.CheckpointManager(tmp_path / "run")
    manager.save(1, model=model, optimizer=adam, metrics={"loss": 0.25})
    model[2].bias.set_value(paddle.to_tensor([2.0, 0.5]))
    manager.save(2, model=model, optimizer=adam)
    return tmp_path / "run"


def said(capsys: Capture, *words: object, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, words)]) == code
    output = capsys.readouterr()
    return output.out if code < 2 else output.err


def test_ls_and_show(home: Path, capsys: Capture) -> None:
    first, second = said(capsys, "ls", home).splitlines()
    assert said(capsys, "list", home).splitlines() == [first, second]
    assert first.split()[0] == "1"
    assert "20 tensors" in first
    assert first.endswith("loss=0.25")
    assert second.split()[0] == "2"
    shown = said(capsys, "show", home, "--step", "1")
    assert "step       1\n" in shown
    assert "optimizer  Adam\n" in shown
    assert "layout     dp 1, mp 1, pp 1, sharding 1" in shown
    assert "2.weight                                 float32  [3, 2]" in shown
    assert "2.weight/beta1_pow_acc_0" in shown
    assert said(capsys, "show", home / "step-00000001") == shown
    assert "no checkpoint of step 5" in said(capsys, "show", home, "--step", "5", code=2)
    assert "no checkpoint in this folder" in said(capsys, "ls", home.parent, code=2)
    (home / "step-00000002").rename(home / "step-00000002.aside")
    assert "2  set aside: the run went back" in said(capsys, "ls", home)


@pytest.mark.parametrize("wrong", [None, -1, 2.5, "\x1b[31m", [], {"a": 1}, 10**400, [[[]]]])
@pytest.mark.parametrize(
    "place",
    [
        *(["step"], ["metrics"], ["metrics", "loss"], ["layout"], ["layout", "dp"], ["versions"]),
        *(["files"], ["files", "0"], ["files", "0", "size"], ["order"], ["order", 0]),
        *(["optimizer"], ["tensors"], ["tensors", "model", "0.bias", "shape", 0]),
    ],
    ids=str,
)
def test_values_of_other_kinds_with_a_right_checksum_are_damage(
    home: Path, place: list[str], wrong: object, capsys: Capture
) -> None:
    file = home / "step-00000001" / "manifest.json"
    contents = json.loads(file.read_text())
    del contents["crc32"]
    names = [next(iter(contents["files"])) if name == "0" else name for name in place]
    holder = contents
    for name in names[:-1]:
        holder = holder[name]
    holder[names[-1]] = wrong
    file.write_text(manifest.seal(contents))
    for words in (["show", home / "step-00000001"], ["ls", home]):
        assert main(["checkpoint", *map(str, words)]) in (0, 2)
        output = capsys.readouterr()
        assert "\x1b" not in output.out + output.err
        assert len(output.err.splitlines()) <= 8


def test_verify_calls_nothing_damaged_that_a_job_removes_meanwhile(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_texts = StepReader.check_texts

    def after_it_is_gone(reader: StepReader) -> None:
        run_folder.remove_step(home, 1)
        check_texts(reader)

    monkeypatch.setattr(StepReader, "check_texts", after_it_is_gone)
    told = said(capsys, "verify", home).splitlines()
    assert told[0].startswith("step-00000001: removed or replaced meanwhile")
    assert told[1].startswith("step-00000002: whole")


def test_verify_names_what_is_damaged(home: Path, capsys: Capture) -> None:
    hashes = [one.split()[5] for one in said(capsys, "ls", home).splitlines()]
    whole = [f"step-0000000{step}: whole, {one}\n" for step, one in enumerate(hashes, 1)]
    assert said(capsys, "verify", home) == "".join(whole)
    path = home / "step-00000002" / "model-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 8
    path.write_bytes(content)
    told = said(capsys, "verify", home, code=1)
    assert "'2.weight' of the model has other bits than were saved" in told
    assert told.endswith("step-00000002: damaged\n")
    assert said(capsys, "verify", home, "--step", "1") == whole[0]
    (home / "step-00000001" / "manifest.json").write_text("{}")
    assert "step-00000001: damaged" in said(capsys, "verify", home / "step-00000001", code=1)
    assert "damaged: manifest.json is not" in said(capsys, "ls", home)


def test_diff_names_the_first_tensor(home: Path, capsys: Capture) -> None:
    steps = [home / f"step-{step:08d}" for step in (1, 2)]
    assert said(capsys, "diff", steps[0], steps[0]) == "all tensors have the same bits\n"
    told = said(capsys, "diff", *steps, code=1)
    assert told.startswith("'2.bias' of the model differs first: 2 of 2 elements, the first at [0]")
    assert told.endswith("and 2.0\n1 of 20 tensors differ\n")
    other = nn.Sequential(nn.Linear(4, 3))
    fleetpipe.CheckpointManager(home.parent / "other").save(1, model=other.to(dtype="bfloat16"))
    told = said(capsys, "diff", steps[0], home.parent / "other", code=1)
    assert "only the first has '2.bias' of the model" in told
    assert "float32 of shape [3] and bfloat16 of shape [3]" in told


def test_merge_makes_one_file(home: Path, capsys: Capture) -> None:
    for name in ("all.safetensors", "all.pdparams"):
        said(capsys, "merge", home, home.parent / name)
    merged = load_file(home.parent / "all.safetensors")
    loaded = paddle.load(str(home.parent / "all.pdparams"))
    assert [*loaded] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {name: array.tobytes() for name, array in merged.items()} == bits(loaded)
    assert np.array_equal(merged["2.bias"], [2.0, 0.5])
    assert ".safetensors or a .pdparams" in said(capsys, "merge", home, home / "x.zip", code=2)
    assert "needs a second path" in said(capsys, "merge", home, code=2)
    assert "takes one path" in said(capsys, "ls", home, home, code=2)


def test_fleets_layer_files_are_read_and_written(tmp_path: Path, capsys: Capture) -> None:
    layers = [*mlp_layers(), LayerDesc(nn.LayerNorm, 4)]
    ours, theirs, again = (tmp_path / name for name in ("ours", "theirs", "again"))
    with job(2):
        model = pipeline(layers).layers
        for parameter in model.parameters():
            parameter.set_value(paddle.rand(parameter.shape))
        model.save_state_dict(theirs)
        said(capsys, "convert", theirs, ours, "--step", "7")
        other = pipeline(layers).layers
        manager = fleetpipe.CheckpointManager(ours)
        assert manager.restore(model=other, only=("model",)).step == 7
        assert bits(other.full_state_dict()) == bits(model.full_state_dict())
        said(capsys, "convert", ours, again)
        assert "step 6 or later ones" in said(
            capsys, "convert", theirs, ours, "--step", "6", code=2
        )
        third = pipeline(layers).layers
        third.set_state_dir(again)
        assert bits(third.full_state_dict()) == bits(model.full_state_dict())


def test_looking_needs_no_paddle(home: Path) -> None:
    done = without_paddle(
        f"""
from fleetpipe.cli import main
for words in (["ls"], ["show"], ["verify"]):
    assert main(["checkpoint", *words, {str(home)!r}]) == 0
assert main(["checkpoint", "diff", {str(home)!r}, {str(home)!r}]) == 0
assert main(["checkpoint", "merge", {str(home)!r}, {str(home / "x.safetensors")!r}]) == 0
"""
    )
    assert done.returncode == 0, done.stderr
