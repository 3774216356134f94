"""Saving, loading and exporting by parameter name, from and to dynamic graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.static import device_guard

from fleetpipe import fleet, static
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet_files import arrays
from tests.static.networks import (
    CLASSES,
    FEATURES,
    assert_same,
    batches,
    executor_of,
    mlp,
    static_mode,
    strategy_of,
)


def started(seed: int = 7) -> Any:
    """A pipeline with an Adam whose startup has run; returns its executor and fetches."""
    paddle.seed(seed)
    fleet.init(is_collective=True, strategy=strategy_of())
    fetches = mlp(2, norm=True)()
    optimizer = paddle.optimizer.Adam(0.05)
    return executor_of(fetches[0], strategy_of(), optimizer), fetches


def train(exe: Any, loss: Any, feeds: list[Any]) -> list[Any]:
    return [exe.run(feed=feed, fetch_list=[loss])[0] for feed in feeds]


def test_what_is_saved_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    feeds = batches(4)
    with static_mode():
        exe, (loss, _) = started()
        expected = train(exe, loss, feeds[:2])
        path = static.save(tmp_path / "half")
        expected += train(exe, loss, feeds[2:])
    assert path == tmp_path / "half.pdparams"
    with static_mode():
        exe, (loss, _) = started(seed=8)
        static.load(tmp_path / "half")
        assert train(exe, loss, feeds[2:]) == expected[2:]
        with pytest.raises(CheckpointError, match="there is no"):
            static.load(tmp_path / "other")


def test_a_file_of_which_something_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with static_mode():
        exe, (loss, _) = started()
        train(exe, loss, batches(2))
        path = static.save(tmp_path / "half")
        contents = {file: arrays(file) for file in (path, path.with_suffix(".pdopt"))}
        train(exe, loss, batches(1))
        expected = static.full_state_dict()
        for file, whole in contents.items():
            name = next(name for name in sorted(whole, reverse=True) if whole[name].ndim == 2)
            paddle.save({**whole, name: whole[name].astype("float64")}, str(file))
            with pytest.raises(CheckpointError, match=rf"'{name}' does not[\s\S]*{file.name}"):
                static.load(tmp_path / "half")
            paddle.save(whole, str(file))
        for damaged in (b"", b"PK\x03\x04", path.read_bytes()[:-500]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"half.pdparams is not what paddle.save"):
                static.load(tmp_path / "half")
        assert_same(static.full_state_dict(), expected)


def test_a_state_dict_that_does_not_fit() -> None:
    with static_mode():
        started()
        state = static.full_state_dict()
        name = next(iter(state))
        with pytest.raises(CheckpointError, match="the state has no"):
            static.load_state_dict({k: v for k, v in state.items() if k != name})
        with pytest.raises(CheckpointError, match="does not fit"):
            static.load_state_dict({**state, name: state[name][:1]})


def test_the_whole_network_is_exported_as_one_program(tmp_path: Path) -> None:
    feed = batches(1)[0]
    with static_mode():
        exe, (loss, logits) = started()
        train(exe, loss, batches(2))
        state = static.full_state_dict()
        x = next(v for v in paddle.static.default_main_program().list_vars() if v.name == "x")
        static.save_inference_model(tmp_path / "net", [x], [logits], exe)
        expected = train(exe, loss, batches(3))
        assert len(set(map(float, expected))) == 3
    with static_mode():
        exe = paddle.static.Executor(paddle.CPUPlace())
        program, names, targets = paddle.static.load_inference_model(str(tmp_path / "net"), exe)
        assert names == ["x"]
        (got,) = exe.run(program, feed={"x": feed["x"]}, fetch_list=targets)
    np.testing.assert_allclose(got, evaluated(state, feed["x"]), rtol=1e-4, atol=1e-6)


def evaluated(state: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The logits of ``mlp(2, norm=True)`` for inference, by hand."""
    # The older Program counts other things under these names as well.
    layers = sorted({name.split(".")[0] for name in state if name.startswith("linear")})
    norms = sorted({name.split(".")[0] for name in state if name.startswith("batch_norm")})
    for layer, norm in zip(layers, norms):
        x = np.tanh(x @ state[f"{layer}.w_0"] + state[f"{layer}.b_0"])
        mean, variance, scale, shift = (state[f"{norm}.{p}"] for p in ("w_1", "w_2", "w_0", "b_0"))
        x = (x - mean) / np.sqrt(variance + 1e-5) * scale + shift
    return x @ state[f"{layers[2]}.w_0"] + state[f"{layers[2]}.b_0"]


def linear(name: str, width: int, out: int) -> Any:
    weight, bias = (paddle.ParamAttr(name=f"{name}.{part}") for part in ("weight", "bias"))
    return nn.Linear(width, out, weight_attr=weight, bias_attr=bias)


def layers() -> list[Any]:
    return [linear("a", FEATURES, 8), linear("b", 8, 8), linear("c", 8, CLASSES)]


def in_two_stages() -> Any:
    first, second, last = layers()
    with device_guard("gpu:0"):
        hidden = paddle.tanh(first(paddle.static.data("x", [-1, FEATURES])))
    with device_guard("gpu:1"):
        label = paddle.static.data("y", [-1, 1], "int64")
        return nn.functional.cross_entropy(last(paddle.tanh(second(hidden))), label)


def test_a_dynamic_model_and_the_pipeline_have_the_same_losses() -> None:
    feeds = batches(5)
    first, second, last = layers()
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    state = {parameter.name: parameter.numpy() for parameter in model.parameters()}
    expected = []
    for feed in feeds:
        losses = []
        for part in range(4):
            rows = slice(part * 2, part * 2 + 2)
            x, y = (paddle.to_tensor(feed[name][rows]) for name in "xy")
            loss = nn.functional.cross_entropy(model(x), y) / 4
            loss.backward()
            losses.append(loss.numpy())
        optimizer.step()
        optimizer.clear_grad()
        expected.append(np.sum(losses, axis=0, dtype="float32"))
    with static_mode():
        paddle.seed(1)
        fleet.init(is_collective=True, strategy=strategy_of())
        loss = in_two_stages()
        exe = executor_of(loss, strategy_of())
        static.load_state_dict(state)
        assert train(exe, loss, feeds) == expected
        trained = static.full_state_dict()
    for parameter in model.parameters():
        np.testing.assert_array_equal(parameter.numpy(), trained[parameter.name])
