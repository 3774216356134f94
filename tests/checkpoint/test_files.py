"""The files of a checkpoint: named as PaddleNLP names them, and refused where they are damaged."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.optimizer.lr import CosineAnnealingWarmRestarts
from safetensors import safe_open
from safetensors.numpy import save_file

import fleetpipe
from fleetpipe.checkpoint.contents.parts import TensorName
from fleetpipe.checkpoint.files import manifest, run_folder, tensors
from fleetpipe.checkpoint.files.manifest import StepReader
from fleetpipe.checkpoint.files.tensors import Inventory, plan_files
from fleetpipe.errors import CheckpointError
from fleetpipe.mesh.parts import LocalTensor, Region


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1D(3))
    fleetpipe.CheckpointManager(tmp_path).save(1, model=model)
    path = tmp_path / "step-00000001" / "model-00001-of-00001.safetensors"
    with safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == sorted(model.state_dict())
        assert file.metadata() == {"format": "pd"}
        for name, tensor in model.state_dict().items():
            assert file.get_tensor(name).tobytes() == tensor.numpy().tobytes()


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    arrays = {
        "b": numbers.standard_normal((2, 3)),
        "a": numbers.standard_normal((5,)).astype("float32"),
        "none": np.zeros((0, 4), "int64"),
        "one": np.array(7, "int8"),
    }
    save_file(arrays, tmp_path / "x.safetensors")
    layout = tensors.read_layout(tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("rb", buffering=0) as file:
        for name, array in arrays.items():
            stored = layout.tensors[name]
            memory = bytearray(stored.tensor.nbytes)
            tensors.read(file, stored, None, memoryview(memory))
            assert (stored.tensor.shape, bytes(memory)) == (array.shape, array.tobytes())


@pytest.mark.parametrize("dtype", sorted(tensors.CODES))
def test_every_dtype_comes_back(tmp_path: Path, dtype: str) -> None:
    if not hasattr(paddle, dtype):
        pytest.skip(f"this Paddle has no {dtype}")

    def model(values: Any) -> Any:
        made = nn.Layer()
        made.register_buffer("values", values)
        return made

    whole = paddle.to_tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    saved, other = model(whole.astype(dtype)), model(paddle.zeros([5]).astype(dtype))
    manager = fleetpipe.CheckpointManager(tmp_path)
    manager.save(1, model=saved)
    manager.restore(model=other)
    assert other.values.dtype == saved.values.dtype
    assert other.values.astype("float32").tolist() == whole.tolist()


def test_a_dtype_without_a_place_is_refused(tmp_path: Path) -> None:
    model = nn.Layer()
    model.register_buffer("values", paddle.ones([2]).astype("complex128"))
    with pytest.raises(CheckpointError, match="safetensors has no complex128"):
        fleetpipe.CheckpointManager(tmp_path).save(1, model=model)
    assert not [*tmp_path.glob("step*")]


def test_large_models_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "FILE_BYTES", 700)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    adam = paddle.optimizer.Adam(parameters=model.parameters())
    for parameter in model.parameters():
        parameter.grad = paddle.ones(parameter.shape)
    adam.step()
    fleetpipe.CheckpointManager(tmp_path).save(1, model=model, optimizer=adam)
    folder = tmp_path / "step-00000001"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 12 * 72 * 4}
    # In the order of the layers: 10 comes after 9.
    assert index["weight_map"]["0.bias"] == "model-00001-of-00006.safetensors"
    assert index["weight_map"]["11.weight"] == "model-00006-of-00006.safetensors"
    states = json.loads((folder / "optimizer.safetensors.index.json").read_text())
    assert states["weight_map"]["3.weight/moment1_0"].startswith("optimizer-")
    assert "3.weight/beta1_pow_acc_0" in states["weight_map"]
    assert states["master_weights"] is False
    for name, file in {**index["weight_map"], **states["weight_map"]}.items():
        assert name in tensors.read_layout(folder / file).tensors
    other = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    fleetpipe.load_single(other, tmp_path)
    for own, its in zip(model.parameters(), other.parameters()):
        assert own.numpy().tobytes() == its.numpy().tobytes()


def test_a_first_tensor_may_have_no_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("a_cache", paddle.zeros([0, 4]))
    fleetpipe.CheckpointManager(tmp_path).save(1, model=model)
    other = nn.Linear(2, 2)
    other.register_buffer("a_cache", paddle.zeros([0, 4]))
    fleetpipe.load_single(other, tmp_path)
    assert other.a_cache.shape == [0, 4]
    assert np.array_equal(other.weight.numpy(), model.weight.numpy())


def held(shape: tuple[int, ...], cut: Region | None = None) -> LocalTensor:
    return LocalTensor(np.zeros(shape, "float32"), cut)


def test_ranks_share_the_writing() -> None:
    """Two replicas of two slices: each writes half of what is whole, and its slice."""
    whole = {TensorName("model", f"{i}.weight"): held((4, 4)) for i in range(4)}
    ranks = [
        Inventory.describe(
            {**whole, TensorName("model", "cut"): held((4, 2), Region(1, 2 * m, 2 * m + 2, 4))}
        )
        for m in (0, 1, 0, 1)
    ]
    found = plan_files(ranks)
    (shares,) = found.shares.values()
    assert [share.cut for share in shares["cut"]] == [Region(1, 0, 2, 4), Region(1, 2, 4, 4)]
    written = [0] * 4
    for ones in shares.values():
        for share in ones:
            written[share.writer] += 16 if share.cut is None else 8
    assert sorted(written) == [16, 16, 24, 24]


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (held((4, 3)), "do not have the same 'x' of the model"),
        (held((3, 4), Region(0, 4, 7, 8)), "do not hold the whole of 'x' of the model"),
        (held((4, 4), Region(1, 4, 8, 8)), "do not have the same 'x' of the model"),
    ],
)
def test_ranks_that_hold_something_else_are_refused(others: LocalTensor, told: str) -> None:
    first = held((4, 4)) if others.cut is None else held((4, 4), Region(0, 0, 4, 8))
    ranks = [Inventory.describe({TensorName("model", "x"): one}) for one in (first, others)]
    with pytest.raises(CheckpointError, match=told):
        plan_files(ranks)


@pytest.mark.parametrize("shape", [[1] * 33, [0, 1 << 40, 1 << 40], [99] * 100_000])
def test_a_shape_that_no_tensor_has_is_refused_before_it_is_multiplied(
    shape: list[int], tmp_path: Path
) -> None:
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, int(0 not in shape)]}
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(0 not in shape))
    with pytest.raises(CheckpointError, match="'w' has sizes that are no numbers"):
        tensors.read_layout(path)


FLIPS = 300


class Run:
    """A small model with an optimizer that has stepped, different for each seed."""

    def __init__(self, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8), nn.Linear(8, 3))
        self.optimizer = paddle.optimizer.Adam(0.1, parameters=self.model.parameters())
        for parameter in self.model.parameters():
            parameter.set_value(numbers.standard_normal(parameter.shape).astype("float32"))
            parameter.grad = paddle.ones(parameter.shape) * 0.5
        self.optimizer.step()
        self.objects = {"model": self.model, "optimizer": self.optimizer}

    def bits(self) -> dict[str, bytes]:
        tensors = {**self.model.state_dict(), **self.optimizer.state_dict()}
        tensors.pop("LR_Scheduler", None)
        drawn = {"drawn": np.asarray(paddle.get_rng_state()[0].current_seed()).tobytes()}
        return {**{name: t.numpy().tobytes() for name, t in tensors.items()}, **drawn}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fleetpipe.CheckpointManager(tmp_path).save(1, **Run(1).objects)
    return tmp_path / "step-00000001"


def refused(home: Path, run: Run) -> str:
    """The error of restoring; makes sure that it changed nothing."""
    before = run.bits()
    with pytest.raises(CheckpointError) as caught:
        fleetpipe.CheckpointManager(home).restore(**run.objects)
    assert run.bits() == before
    return str(caught.value)


def test_every_flipped_bit_is_found_and_named(saved: Path) -> None:
    numbers, run = random.Random(4), Run(2)
    files = {path: path.read_bytes() for path in saved.iterdir()}
    assert len(files) == 6
    sizes = [len(content) for content in files.values()]
    for _ in range(FLIPS):
        path = numbers.choices([*files], sizes)[0]
        place, bit = numbers.randrange(len(files[path])), 1 << numbers.randrange(8)
        damaged = bytearray(files[path])
        damaged[place] ^= bit
        path.write_bytes(damaged)
        assert path.name in refused(saved.parent, run)
        path.write_bytes(files[path])
    fleetpipe.CheckpointManager(saved.parent).restore(**run.objects)
    saved_run = Run(1)
    for name, tensor in run.model.state_dict().items():
        assert tensor.numpy().tobytes() == saved_run.model.state_dict()[name].numpy().tobytes()


def test_a_flipped_bit_of_a_tensor_names_the_tensor(saved: Path) -> None:
    path = saved / "optimizer-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # 2.weight's second moment: names are in order
    path.write_bytes(content)
    text = refused(saved.parent, Run(2))
    assert "'2.weight/moment2_0' of the optimizer has other bits than were saved" in text
    assert StepReader(saved).find_damage()[0].args == (text,)
    # The model alone is whole.
    fleetpipe.CheckpointManager(saved.parent).restore(model=Run(3).model, only=("model",))


def test_files_that_end_early_or_go_on_are_refused(saved: Path) -> None:
    run = Run(2)
    for name in ("manifest.json", "state.json", "model-00001-of-00001.safetensors"):
        content = (saved / name).read_bytes()
        for cut in (b"", content[:1], content[: len(content) // 2], content[:-1], content + b"\0"):
            (saved / name).write_bytes(cut)
            assert name in refused(saved.parent, run)
        (saved / name).write_bytes(content)


def foreign(path: Path) -> None:
    path.write_bytes(b"\x89PNG" + b"x" * 100)


def pickled(path: Path) -> None:
    paddle.save({"weight": paddle.ones([3])}, str(path))


def other_model(path: Path) -> None:
    home = path.parent.parent / "other"
    fleetpipe.CheckpointManager(home).save(1, model=nn.Linear(3, 3))
    shutil.copy(home / path.parent.name / path.name, path)


def test_files_of_others_are_refused(saved: Path) -> None:
    path = saved / "model-00001-of-00001.safetensors"
    for replace in (foreign, pickled, other_model, Path.unlink):
        replace(path)
        assert path.name in refused(saved.parent, Run(2))


def changed(path: Path, change: Callable[[Any], None]) -> None:
    """Changes a manifest, and makes its checksum right again."""
    contents = json.loads(path.read_text())
    del contents["crc32"]
    change(contents)
    path.write_text(manifest.seal(contents))


FOLDER_NAMES = "expected: names of files of the folder"
MODEL_NAMES = "expected: the names of the model's tensors"


def of_weight(**fields: Any) -> Callable[[Any], None]:
    return lambda m: m["tensors"]["model"]["0.weight"].update(fields)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.update(version=2), "expected: 1, which this fleetpipe reads"),
        (lambda m: m.update(format="zip"), "got: 'zip'"),
        (lambda m: m.update(files=[]), "manifest.json"),
        (lambda m: m.update(files={"../x": {"size": 1, "crc32": 2}}), FOLDER_NAMES),
        (lambda m: m["files"].update({"a\0b": {"size": 1, "crc32": 2}}), FOLDER_NAMES),
        (lambda m: m["tensors"]["model"].update({"0.weight": {}}), "manifest.json"),
        (of_weight(dtype="float99"), "got: 'float99'"),
        (of_weight(shape=[8, 4]), "0.weight"),
        (of_weight(shape=[1] * 33), "expected: the shape of a tensor"),
        (of_weight(pieces=[]), "0.weight"),
        (of_weight(shape="abc"), "0.weight"),
        (lambda m: m["tensors"]["model"].pop("0.weight"), MODEL_NAMES),
        (lambda m: m.update(order=["0.weight"]), MODEL_NAMES),
        (lambda m: m.update(optimizer="SGD"), "no state of this optimizer"),
        (lambda m: m.pop("step"), "manifest.json"),
    ],
)
def test_manifests_that_say_something_else_are_refused(
    saved: Path, change: Callable[[Any], None], told: str
) -> None:
    changed(saved / "manifest.json", change)
    assert told in refused(saved.parent, Run(2))


def test_a_model_that_does_not_fit_is_refused(saved: Path) -> None:
    run = Run(2)
    first = (nn.Linear(4, 8), nn.BatchNorm1D(8))
    for model, told in [
        (nn.Sequential(*first), "of another model"),
        (nn.Sequential(*first, nn.Linear(8, 4)), "shape [8, 4]"),
        (Run(3).model.to(dtype="float64"), "float64"),
    ]:
        run.objects["model"] = model
        before = {name: t.numpy().tobytes() for name, t in model.state_dict().items()}
        assert told in refused(saved.parent, run)
        assert before == {name: t.numpy().tobytes() for name, t in model.state_dict().items()}


def test_what_was_not_saved_is_told(saved: Path) -> None:
    manager = fleetpipe.CheckpointManager(saved.parent)
    model = Run(2).model
    with pytest.raises(CheckpointError, match="has no scaler"):
        manager.restore(model=model, scaler=paddle.amp.GradScaler())
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        manager.restore(7, model=model)
    with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
        fleetpipe.CheckpointManager(saved.parent / "nothing").restore(model=model)
    with pytest.raises(CheckpointError, match=f"folder of the run, {saved.parent}$"):
        fleetpipe.load_single(model, saved)
    with pytest.raises(fleetpipe.errors.ConfigError, match="names what was not passed"):
        manager.restore(model=model, only=("modle",))


def test_only_complete_steps_count(saved: Path, caplog: Any) -> None:
    home = saved.parent
    (home / "step-00000009").mkdir()
    shutil.copytree(saved, home / ".draft-00000008-ab")
    (home / "step-7").mkdir()
    manager = fleetpipe.CheckpointManager(home)
    assert manager.steps() == [1]
    lost = f"{home / 'step-00000009'} has no manifest.json any more: that step is passed over"
    assert lost in caplog.text
    saved.rename(saved.with_name("step-00000001.old"))  # a crash as the step was replaced
    assert manager.steps() == [1]
    manager.save(1, **Run(5).objects)
    assert sorted(path.name for path in home.glob("[!.]*") if path.name != "step-00000009") == [
        "step-00000001",
        "step-7",
    ]
    assert not [*home.glob(".draft*")]
    assert run_folder.complete_steps(home) == {1: saved}


def test_what_a_step_has_replaced_does_not_come_back(saved: Path) -> None:
    shutil.copytree(saved, saved.with_name("step-00000001.old"))  # killed while it was removed
    manager = fleetpipe.CheckpointManager(saved.parent, max_to_keep=1)
    manager.save(2, **Run(2).objects)
    assert {path.name for path in saved.parent.iterdir()} == {"step-00000002", ".writer"}


class Remembering(paddle.optimizer.lr.LRScheduler):
    """Its state has a list, which is longer or shorter from time to time."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen
        super().__init__(0.1)

    def get_lr(self) -> float:
        return self.base_lr / (1 + len(self.seen))

    def state_keys(self) -> None:
        super().state_keys()
        self.keys.append("seen")


def test_what_a_state_has_in_lists_is_its_own(tmp_path: Path) -> None:
    manager = fleetpipe.CheckpointManager(tmp_path)
    run, other = Run(1), Run(2)
    manager.save(1, **{**run.objects, "lr_scheduler": Remembering([1])})
    rate = Remembering([0, 0])
    manager.restore(**{**other.objects, "lr_scheduler": rate})
    assert rate.seen == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attributes", {"places": [[[0, 1]] * 3], "of_rank": [0], "states": [{"now": {}}]}),
        ("state", {"places": [], "of_rank": []}),
        ("learning_rate", {"lr": 1}),
        ("learning_rate", "0.1"),
        ("random", 7),
        ("random", {"places": [], "of_rank": [0], "states": [{}]}),
        ("lr_scheduler", {"last_epoch": "3", "last_lr": 0.5}),
        ("lr_scheduler", [3, 0.5]),
        ("restarts", [{"T_cur": "3", "T_i": 4}]),
        ("restarts", {"T_cur": 3}),
    ],
)
def test_a_state_of_another_form_is_refused_before_anything_changes(
    tmp_path: Path, name: str, value: object
) -> None:
    schedules = name in ("lr_scheduler", "restarts")

    def run(seed: int) -> Run:
        made = Run(seed)
        if schedules:
            made.objects["lr_scheduler"] = CosineAnnealingWarmRestarts(0.5, T_0=4)
        return made

    fleetpipe.CheckpointManager(tmp_path).save(1, **run(1).objects)
    step = tmp_path / "step-00000001"
    text = json.dumps({**json.loads((step / "state.json").read_text()), name: value})
    (step / "state.json").write_text(text)
    summary = {"size": len(text), "crc32": zlib.crc32(text.encode())}
    changed(step / "manifest.json", lambda m: m["files"].update({"state.json": summary}))
    assert f"'{name}' of state.json" in refused(tmp_path, run(2)).replace(
        "the saved state of the LR scheduler", "'lr_scheduler' of state.json"
    )
