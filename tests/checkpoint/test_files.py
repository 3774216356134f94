"""The files of a checkpoint: safetensors that its library reads, named as PaddleNLP names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from safetensors import safe_open
from safetensors.numpy import save_file

import fleetpipe
from fleetpipe.checkpoint.contents.parts import TensorName
from fleetpipe.checkpoint.files import plan, tensors
from fleetpipe.checkpoint.files.plan import Inventory, plan_files
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
    monkeypatch.setattr(plan, "FILE_BYTES", 700)
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


def held(shape: tuple[int, ...], cut: Region | None = None) -> LocalTensor:
    return LocalTensor(np.zeros(shape, "float32"), cut)


def test_ranks_share_the_writing() -> None:
    """Two replicas of two slices: each writes half of what is whole, and its slice."""
    whole = {TensorName("model", f"{i}.weight"): held((4, 4)) for i in range(4)}
    ranks = [
        Inventory.of(
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
    ranks = [Inventory.of({TensorName("model", "x"): one}) for one in (first, others)]
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
