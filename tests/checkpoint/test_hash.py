"""``fleetpipe checkpoint`` and the hash of a model: the same whoever writes, on every Paddle."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from safetensors.numpy import load_file, save_file

import fleetpipe
from fleetpipe.checkpoint.contents import training_state
from fleetpipe.checkpoint.files import manifest, run_folder
from fleetpipe.checkpoint.files.manifest import StepReader
from fleetpipe.cli import main
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api import random as paddle_random
from fleetpipe.paddle_api.optimizer import create_state, master_weight_of, state_of
from fleetpipe.paddle_api.random import generator_from
from tests.fixtures import Capture
from tests.ground.test_without_paddle import without_paddle
from tests.launching import ROOT
from tests.pipelines import bits, job, mlp_layers, pipeline

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
    assert manifest.read_manifest(run / "step-00000001").model_hash == expected
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


#: Of paddlepaddle 2.6.2 and 3.3.1.
DIGEST = "0a6ef056ccb90a8e1e8d6edf6c4efdb575674e5894f1f2531701f468291c88f6"


def run(fill: bool) -> dict[str, Any]:
    """A model in two precisions with Adam's state, filled with numbers or with zeros."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 2))
    model[2].to(dtype="bfloat16")
    adam = paddle.optimizer.Adam(0.25, parameters=model.parameters(), multi_precision=True)
    numbers = np.random.default_rng(8)
    for parameter in model.parameters():
        create_state(adam, 0, [parameter])
        master = master_weight_of(adam, parameter.name)
        tensors = [*state_of(adam, parameter.name).values(), parameter]
        for tensor in [*tensors, *([] if master is None else [master])]:
            # Exact in bfloat16: the versions round differently.
            values = numbers.integers(-9, 9, tensor.shape).astype("float32") * fill
            tensor.set_value(paddle.to_tensor(values).astype(tensor.dtype))
    return {"model": model, "optimizer": adam}


def drawn() -> tuple[list[float], float, float]:
    return paddle.rand([3]).tolist(), float(np.random.standard_normal()), random.random()


def test_the_files_are_the_same_under_every_paddle(tmp_path: Path) -> None:
    paddle.seed(6)
    np.random.seed(6)
    random.seed(6)
    paddle.rand([1000])
    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(2, **run(fill=True), extra={"epoch": 3})
    expected = drawn()
    digest = hashlib.sha256()
    names = []
    for path in sorted((tmp_path / "step-00000002").iterdir()):
        if path.name != "manifest.json":  # which has the versions
            names.append(path.name.partition("-")[0])
            digest.update(path.read_bytes())
    assert names.count("master_weights") == 1
    assert digest.hexdigest() == DIGEST
    other = run(fill=False)
    manager.restore(**other)
    assert drawn() == expected
    manager.save(3, **other, extra={"epoch": 3})
    for path in (tmp_path / "step-00000002").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "step-00000003" / path.name).read_bytes()


def test_states_come_back_from_text_however_far_from_the_seed() -> None:
    def drawn() -> tuple[list[float], float, float]:
        return paddle.randn([5]).tolist(), float(np.random.standard_normal()), random.gauss(0, 1)

    paddle.seed(7)
    paddle.rand([2_000_003])
    drawn()  # an odd number of Gaussians: each generator has one to spare
    states = json.loads(json.dumps(training_state.random_states()))
    expected = drawn()
    paddle.seed(3)
    drawn()
    assert training_state.random_states() != states
    for _ in range(2):
        training_state.set_random_states(states)
        assert training_state.random_states() == states
        assert drawn() == expected


class Card:
    """The generator of a card, where there is none."""

    def __init__(self, device: int, offset: int) -> None:
        numbers = {"seed": 7, "offset": offset, "engine": ""}
        self.state = generator_from({**numbers, "device": device})

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_random_states_go_from_a_cpu_to_any_card_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, card, other = *paddle_random.generators(), Card(3, 12), Card(0, 0)
    paddle.seed(5)
    on_cpu = training_state.random_states()
    monkeypatch.setattr(paddle_random, "generators", lambda: [card, cpu])
    on_card = json.loads(json.dumps(training_state.random_states()))
    # Ranks on other cards have the same; keys of layers come from the CPU's generator beside.
    assert (on_card["paddle"][0]["device"], on_card["paddle"][1:]) == (0, on_cpu["paddle"])
    expected = paddle.rand([5]).tolist()
    monkeypatch.setattr(paddle_random, "generators", lambda: [other, cpu])
    for states, numbers in ((on_cpu, "0 7 0"), (on_card, "0 7 12")):
        training_state.set_random_states(states)
        assert str(other.state).startswith(f"{numbers} ")
        assert paddle.rand([5]).tolist() == expected
    monkeypatch.setattr(paddle_random, "generators", lambda: [cpu])
    training_state.set_random_states(on_card)
    assert paddle.rand([5]).tolist() == expected


def test_states_of_ranks_are_compared_by_the_card_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, tracker = [], paddle.distributed.fleet.meta_parallel.get_rng_state_tracker()
    for place in (0, 1):
        states = [Card(device, 12 * (device == place)).state for device in (0, 1)]
        monkeypatch.setattr(paddle_random, "device_id", lambda place=place: place)
        monkeypatch.setattr(tracker, "get_states_tracker", lambda states=states: {"mp": states})
        seen.append(paddle_random.stream_states())
    assert seen[0] == seen[1]


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


def told_by(capsys: Capture, *words: object, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, words)]) == code
    output = capsys.readouterr()
    return output.out if code < 2 else output.err


def test_ls_and_show(home: Path, capsys: Capture) -> None:
    first, second = told_by(capsys, "ls", home).splitlines()
    assert told_by(capsys, "list", home).splitlines() == [first, second]
    assert first.split()[0] == "1"
    assert "20 tensors" in first
    assert first.endswith("loss=0.25")
    assert second.split()[0] == "2"
    shown = told_by(capsys, "show", home, "--step", "1")
    assert "step       1\n" in shown
    assert "optimizer  Adam\n" in shown
    assert "layout     dp 1, mp 1, pp 1, sharding 1" in shown
    assert "2.weight                                 float32  [3, 2]" in shown
    assert "2.weight/beta1_pow_acc_0" in shown
    assert told_by(capsys, "show", home / "step-00000001") == shown
    assert "no checkpoint of step 5" in told_by(capsys, "show", home, "--step", "5", code=2)
    assert "no checkpoint in this folder" in told_by(capsys, "ls", home.parent, code=2)
    (home / "step-00000002").rename(home / "step-00000002.aside")
    assert "2  set aside: the run went back" in told_by(capsys, "ls", home)


WRONG = (None, -1, 2.5, "\x1b[31m", [], {"a": 1}, 10**400, [[[]]])


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
    home: Path, place: list[str], capsys: Capture
) -> None:
    file = home / "step-00000001" / "manifest.json"
    contents = json.loads(file.read_text())
    del contents["crc32"]
    *names, last = [next(iter(contents["files"])) if name == "0" else name for name in place]
    holder = functools.reduce(operator.getitem, names, contents)
    for wrong in WRONG:
        holder[last] = wrong
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
    told = told_by(capsys, "verify", home).splitlines()
    assert told[0].startswith("step-00000001: removed or replaced meanwhile")
    assert told[1].startswith("step-00000002: whole")


def test_verify_names_what_is_damaged(home: Path, capsys: Capture) -> None:
    hashes = [one.split()[5] for one in told_by(capsys, "ls", home).splitlines()]
    whole = [f"step-0000000{step}: whole, {one}\n" for step, one in enumerate(hashes, 1)]
    assert told_by(capsys, "verify", home) == "".join(whole)
    path = home / "step-00000002" / "model-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 8
    path.write_bytes(content)
    told = told_by(capsys, "verify", home, code=1)
    assert "'2.weight' of the model has other bits than were saved" in told
    assert told.endswith("step-00000002: damaged\n")
    assert told_by(capsys, "verify", home, "--step", "1") == whole[0]
    (home / "step-00000001" / "manifest.json").write_text("{}")
    assert "step-00000001: damaged" in told_by(capsys, "verify", home / "step-00000001", code=1)
    assert "damaged: manifest.json is not" in told_by(capsys, "ls", home)


def test_diff_names_the_first_tensor(home: Path, capsys: Capture) -> None:
    steps = [home / f"step-{step:08d}" for step in (1, 2)]
    assert told_by(capsys, "diff", steps[0], steps[0]) == "all tensors have the same bits\n"
    told = told_by(capsys, "diff", *steps, code=1)
    assert told.startswith("'2.bias' of the model differs first: 2 of 2 elements, the first at [0]")
    assert told.endswith("and 2.0\n1 of 20 tensors differ\n")
    other = nn.Sequential(nn.Linear(4, 3))
    fleetpipe.CheckpointManager(home.parent / "other").save(1, model=other.to(dtype="bfloat16"))
    told = told_by(capsys, "diff", steps[0], home.parent / "other", code=1)
    assert "only the first has '2.bias' of the model" in told
    assert "float32 of shape [3] and bfloat16 of shape [3]" in told


def test_merge_makes_one_file(home: Path, capsys: Capture) -> None:
    for name in ("all.safetensors", "all.pdparams"):
        told_by(capsys, "merge", home, home.parent / name)
    merged = load_file(home.parent / "all.safetensors")
    loaded = paddle.load(str(home.parent / "all.pdparams"))
    assert [*loaded] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {name: array.tobytes() for name, array in merged.items()} == bits(loaded)
    assert np.array_equal(merged["2.bias"], [2.0, 0.5])
    assert ".safetensors or a .pdparams" in told_by(capsys, "merge", home, home / "x.zip", code=2)
    assert "needs a second path" in told_by(capsys, "merge", home, code=2)
    assert "takes one path" in told_by(capsys, "ls", home, home, code=2)


def test_fleets_layer_files_are_read_and_written(tmp_path: Path, capsys: Capture) -> None:
    layers = [*mlp_layers(), LayerDesc(nn.LayerNorm, 4)]
    ours, theirs, again = (tmp_path / name for name in ("ours", "theirs", "again"))
    with job(2):
        model = pipeline(layers).layers
        for parameter in model.parameters():
            parameter.set_value(paddle.rand(parameter.shape))
        model.save_state_dict(theirs)
        told_by(capsys, "convert", theirs, ours, "--step", "7")
        other = pipeline(layers).layers
        manager = fleetpipe.CheckpointManager(ours)
        assert manager.restore(model=other, only=("model",)).step == 7
        assert bits(other.full_state_dict()) == bits(model.full_state_dict())
        told_by(capsys, "convert", ours, again)
        assert "step 6 or later ones" in told_by(
            capsys, "convert", theirs, ours, "--step", "6", code=2
        )
        third = pipeline(layers).layers
        third.set_state_dir(again)
        assert bits(third.full_state_dict()) == bits(model.full_state_dict())


def test_looking_and_hashing_need_no_paddle(home: Path) -> None:
    run, merged = str(home), str(home / "x.safetensors")
    done = without_paddle(
        f"""
from fleetpipe.cli import main
for action in ("ls", "show", "verify"):
    assert main(["checkpoint", action, {run!r}]) == 0
assert main(["checkpoint", "diff", {run!r}, {run!r}]) == 0
assert main(["checkpoint", "merge", {run!r}, {merged!r}]) == 0
assert main(["hash", {run!r}, {merged!r}]) == 0
"""
    )
    assert done.stdout.endswith(f"{merged}: the same model as {run}\n"), done.stderr
    assert done.returncode == 0, done.stderr
