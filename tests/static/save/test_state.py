"""Saving, loading and exporting by parameter name, and all names of Paddle's that do so."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, static
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.fleet_files import arrays
from fleetpipe.paddle_api.static import program_classes, static_io
from fleetpipe.static import full_state_dict, pipeline_programs, state_dict
from fleetpipe.static.entry import patches
from fleetpipe.static.entry.patches import SERVED, SERVED_METHODS
from tests.fixtures import Call
from tests.static.networks import assert_same, batches, executor_of, mlp, static_mode, strategy_of


def started(seed: int = 7) -> Any:
    """A pipeline with an Adam whose startup has run; returns its executor and fetches."""
    paddle.seed(seed)
    fleet.init(is_collective=True, strategy=strategy_of())
    fetches = mlp(2, norm=True)()
    optimizer = paddle.optimizer.Adam(0.05)
    return executor_of(fetches[0], strategy_of(), optimizer), fetches


def train(exe: Any, loss: Any, feeds: list[Any]) -> list[Any]:
    return [exe.run(feed=feed, fetch_list=[loss])[0] for feed in feeds]


def test_a_pipeline_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    feeds, prefix = batches(4), tmp_path / "folder" / "half"
    with static_mode():
        exe, (loss, _) = started()
        train(exe, loss, feeds[:2])
        saved = state_dict()
        assert static.save(tmp_path / "ours") == tmp_path / "ours.pdparams"
        paddle.static.save(paddle.static.default_main_program(), prefix)
        expected = train(exe, loss, feeds[2:])
    with static_mode():
        exe, (loss, _) = started(seed=8)
        main, file = paddle.static.default_main_program(), prefix.with_suffix(".pdparams")
        for load in (lambda: static.load(tmp_path / "ours"), lambda: stock_load(main, file, exe)):
            load()
            assert train(exe, loss, feeds[2:]) == expected
    assert_same(paddle.load(str(file), return_numpy=True), saved)
    assert any("moment" in name for name in paddle.load(f"{prefix}.pdopt"))


def stock_load(*arguments: Any) -> None:
    paddle.static.load(*arguments)


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with static_mode():
        exe, (loss, _) = started()
        main = paddle.static.default_main_program()
        train(exe, loss, batches(2))

        def refused(words: str, call: Callable[..., object], *arguments: Any) -> None:
            with pytest.raises(CheckpointError, match=words):
                call(*arguments)

        refused("there is no", static.load, tmp_path / "half")
        refused("save and load on as many ranks", paddle.static.load, main, tmp_path / "half")
        refused("there is no state at", paddle.static.load_program_state, str(tmp_path / "half"))
        path = static.save(tmp_path / "half")
        train(exe, loss, batches(1))
        expected = static.full_state_dict()
        for file in (path, path.with_suffix(".pdopt")):
            content, whole = file.read_bytes(), arrays(file)
            name = next(name for name in sorted(whole, reverse=True) if whole[name].ndim == 2)
            other = pickle.dumps({**whole, name: whole[name].astype("float64")})
            for damaged, words in [
                (other, rf"'{name}' does not[\s\S]*{file.name}"),
                (pickle.dumps({"nothing": np.zeros(1)}), f"{file.name} has no"),
                (pickle.dumps({"os": os.system}), "the name 'posix.system'"),
                *(
                    (bad, f"{file.name} is not what")
                    for bad in (b"", b"PK\x03\x04", content[:-500])
                ),
            ]:
                file.write_bytes(damaged)
                refused(words, paddle.static.load, main, str(tmp_path / "half"))
            file.write_bytes(content)
        name, *others = expected
        refused("the state has no", static.load_state_dict, {n: expected[n] for n in others})
        wrong = {**expected, name: expected[name][:1]}
        refused("does not fit", static.load_state_dict, wrong)
        for state in ({}, {"0.weight": np.ones(8, "float32")}):
            refused("no name of the program", paddle.static.set_program_state, main, state)
        assert_same(static.full_state_dict(), expected)


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


def test_other_programs_are_saved_and_loaded_as_before(tmp_path: Path) -> None:
    path = str(tmp_path / "net")
    with static_mode():
        fleet.init(is_collective=True)
        y = nn.Linear(2, 3)(paddle.static.data("x", [-1, 2]))
        main = paddle.static.default_main_program()
        exe = executor_of()
        fed = {"x": np.ones((1, 2), "float32")}
        expected = exe.run(feed=fed, fetch_list=[y])[0]
        paddle.static.save(main, path)
        exe.run(paddle.static.default_startup_program())
        assert not np.array_equal(exe.run(feed=fed, fetch_list=[y])[0], expected)
        paddle.static.load(main, path, exe)
        np.testing.assert_array_equal(exe.run(feed=fed, fetch_list=[y])[0], expected)


STATE = re.compile("save|load|state|serializ|persist|param|average", re.IGNORECASE)
#: Those with such a name that touch no state, or another program than a pipeline's.
NO_STATE = {
    *("Parameter", "WeightNormParamAttr", "create_parameter", "is_persistable", "is_parameter"),
    *("load_from_file", "save_to_file", "load_inference_model", "load_inference_model_pir"),
    *("serialize_program", "deserialize_program", "get_program_persistable_vars", "param_attr"),
    *("get_pir_parameters", "get_all_parameter_values", "get_parameter_value_by_name"),
    *("set_parameters_from", "parameters_num", "all_parameters", "parse_from_string"),
}
#: What those of the tables call.
WITHIN = {"load_pir", "save_pir", "load_vars_pir", "save_vars_pir", "save_inference_model_pir"}


def test_each_name_of_paddles_with_a_programs_state_is_in_a_table() -> None:
    tables = {(place, name) for place, name, _ in patches.replacements()}
    served = {serve.__name__ for serve in SERVED} | {serve.__name__ for serve in SERVED_METHODS}
    names = {(paddle.static, name) for name in dir(paddle.static)}
    names |= {(static_io, n) for n, one in vars(static_io).items() if _is_of(static_io, one)}
    names |= {(kind, name) for kind in program_classes() for name in dir(kind)}
    missing = {
        name
        for place, name in names
        if STATE.search(name)
        and not name.startswith("_")
        and (place, name) not in tables
        and name not in NO_STATE | WITHIN | {"ExponentialMovingAverage"}
    }
    assert not missing
    assert {"load_program_state", "state_dict"} <= served


def _is_of(module: Any, value: object) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def test_a_programs_state_has_that_of_the_optimizer_and_goes_on() -> None:
    feeds = batches(4)
    with static_mode():
        exe, (loss, _) = started()
        main = paddle.static.default_main_program()
        train(exe, loss, feeds[:2])
        copies = {name: np.array(tensor) for name, tensor in main.state_dict().items()}
        assert sorted(main.state_dict("param")) == sorted(state_dict())
        assert any("moment1" in name for name in main.state_dict("opt"))
        assert set(main.state_dict("opt")).isdisjoint(main.state_dict("param"))
        expected = train(exe, loss, feeds[2:])
        main.set_state_dict(copies, paddle.static.global_scope())
        assert train(exe, loss, feeds[2:]) == expected
        paddle.static.set_program_state(main, {"linear_0.b_0": np.ones(8, "float32")})
        assert state_dict()["linear_0.b_0"].tolist() == [1.0] * 8


WHOLE: dict[str, Callable[[Any, Any], object]] = {
    "save_vars": lambda exe, main: paddle.static.save_vars(exe, "folder", main),
    "load_vars": lambda exe, main: paddle.static.load_vars(exe, "folder", main_program=main),
    "save_persistables": lambda exe, main: paddle.distributed.io.save_persistables(
        exe, "folder", main
    ),
    "fleet.save_persistables": lambda exe, main: fleet.save_persistables(exe, "folder", main),
    "ModelAverage": lambda exe, main: paddle.incubate.ModelAverage(0.15),
    "ExponentialMovingAverage": lambda exe, main: paddle.static.ExponentialMovingAverage(0.9),
}


def test_what_takes_a_whole_program_is_refused_unless_the_script_names_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with static_mode():
        exe, _ = started()
        main = paddle.static.default_main_program()
        for name, call in WHOLE.items():
            with pytest.raises(ConfigError, match=name):
                call(exe, main)
        assert not list(tmp_path.iterdir())
        wanted = [p for p in main.global_block().all_parameters() if p.name == "linear_0.b_0"]
        paddle.static.save_vars(exe, str(tmp_path), main, vars=wanted)
        assert [path.name for path in tmp_path.iterdir()] == ["linear_0.b_0"]


def test_an_average_before_minimize_is_refused_there() -> None:
    with static_mode():
        fleet.init(is_collective=True, strategy=strategy_of())
        loss = mlp(2)()[0]
        pipeline_programs.note_average(paddle.static.default_main_program(), "ModelAverage")
        with pytest.raises(ConfigError, match="does not run ModelAverage"):
            executor_of(loss, strategy_of())


def _of_rank(folder: str) -> tuple[bool, bool, str]:
    """Goes on from a state that was saved; then takes that of a program."""
    feeds = batches(4)
    with static_mode():
        exe, (loss, _) = started()
        main = paddle.static.default_main_program()
        train(exe, loss, feeds[:2])
        paddle.static.save(main, f"{folder}/half")
        fleet.init_worker()
        train(exe, loss, feeds[2:])
        expected = full_state_dict()
        state = paddle.static.load_program_state(f"{folder}/half.pdparams")
        paddle.static.set_program_state(main, state)
        train(exe, loss, feeds[2:])
        assert_same(full_state_dict(), expected)
        try:
            main.state_dict()
        except ConfigError as error:
            return set(state_dict()) < set(state), bool(fleet.stop_worker()), str(error)
    raise AssertionError("a part passes as the state of the program")


@pytest.mark.processes
def test_each_rank_has_its_part_of_a_state(on_ranks: Call, tmp_path: Path) -> None:
    for has_optimizer, stopped, words in on_ranks(partial(_of_rank, str(tmp_path)), 2):
        assert (has_optimizer, stopped) == (True, False)
        assert "'allow': ['state:Program.state_dict']" in words
