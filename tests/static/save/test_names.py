"""All names of Paddle's that read or write a program's state: served, refused, or none of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.paddle_api.static import program_classes, static_io
from fleetpipe.static import full_state_dict, state_dict
from fleetpipe.static.entry import program_state
from fleetpipe.static.entry.program_state import SERVED, SERVED_METHODS
from tests.fixtures import Call
from tests.static.networks import assert_same, batches, executor_of, mlp, static_mode, strategy_of
from tests.static.save.test_state import started, train

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
    tables = {(place, name) for place, name, _ in program_state.replacements()}
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


def test_a_state_without_a_name_of_the_program_is_refused(tmp_path: Path) -> None:
    with static_mode():
        started()
        main = paddle.static.default_main_program()
        for state in ({}, {"0.weight": np.ones(8, "float32")}):
            with pytest.raises(CheckpointError, match="no name of the program"):
                paddle.static.set_program_state(main, state)
        with pytest.raises(CheckpointError, match="there is no state at"):
            paddle.static.load_program_state(str(tmp_path / "nothing"))


WHOLE: list[tuple[str, Callable[[Any, Any], object]]] = [
    ("save_vars", lambda exe, main: paddle.static.save_vars(exe, "folder", main)),
    ("load_vars", lambda exe, main: paddle.static.load_vars(exe, "folder", main_program=main)),
    (
        "save_persistables",
        lambda exe, main: paddle.distributed.io.save_persistables(exe, "folder", main),
    ),
    (
        "fleet.save_persistables",
        lambda exe, main: fleet.save_persistables(exe, "folder", main),
    ),
    ("ModelAverage", lambda exe, main: paddle.incubate.ModelAverage(0.15)),
    ("ExponentialMovingAverage", lambda exe, main: paddle.static.ExponentialMovingAverage(0.9)),
]


@pytest.mark.parametrize(("name", "call"), WHOLE, ids=[name for name, _ in WHOLE])
def test_what_takes_a_whole_program_is_refused_by_name(
    name: str, call: Callable[[Any, Any], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with static_mode():
        exe, _ = started()
        with pytest.raises(ConfigError, match=name):
            call(exe, paddle.static.default_main_program())
        assert not (tmp_path / "folder").exists()


def test_variables_that_the_script_names_are_saved(tmp_path: Path) -> None:
    with static_mode():
        exe, _ = started()
        main = paddle.static.default_main_program()
        wanted = [p for p in main.global_block().all_parameters() if p.name == "linear_0.b_0"]
        paddle.static.save_vars(exe, str(tmp_path), main, vars=wanted)
        assert [path.name for path in tmp_path.iterdir()] == ["linear_0.b_0"]


def test_an_average_before_minimize_is_refused_there() -> None:
    with static_mode():
        fleet.init(is_collective=True, strategy=strategy_of())
        loss = mlp(2)()[0]
        program_state.note_average(paddle.static.default_main_program(), "ModelAverage")
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
