"""Paddle's own save and load on a pipeline's program."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.errors import CheckpointError
from fleetpipe.static import state_dict
from tests.static.networks import assert_same, batches, executor_of, static_mode
from tests.static.save.test_state import started, train


def test_a_pipeline_goes_on_from_what_paddle_saved(tmp_path: Path) -> None:
    feeds = batches(4)
    path = str(tmp_path / "folder" / "half")
    with static_mode():
        exe, (loss, _) = started()
        train(exe, loss, feeds[:2])
        saved = state_dict()
        paddle.static.save(paddle.static.default_main_program(), Path(path))
        expected = train(exe, loss, feeds[2:])
    with static_mode():
        exe, (loss, _) = started(seed=8)
        paddle.static.load(paddle.static.default_main_program(), Path(f"{path}.pdparams"), exe)
        assert train(exe, loss, feeds[2:]) == expected
    parameters = paddle.load(f"{path}.pdparams", return_numpy=True)
    assert sorted(parameters) == sorted(saved)
    for name, value in saved.items():
        np.testing.assert_array_equal(parameters[name], value)
    assert any("moment" in name for name in paddle.load(f"{path}.pdopt"))


def test_what_is_not_there_or_of_another_optimizer(tmp_path: Path) -> None:
    path = str(tmp_path / "half")
    with static_mode():
        exe, (loss, _) = started()
        main = paddle.static.default_main_program()
        with pytest.raises(CheckpointError, match="save and load on as many ranks"):
            paddle.static.load(main, path)
        paddle.static.save(main, path)
        train(exe, loss, batches(1))
        expected = state_dict()
        state = Path(f"{path}.pdopt")
        for contents, message in [
            (pickle.dumps({"nothing": np.zeros(1)}), "half.pdopt has no"),
            (state.read_bytes()[:-100], "half.pdopt is not what paddle.save writes"),
            (pickle.dumps({"os": os.system}), "the name 'posix.system'"),
        ]:
            state.write_bytes(contents)
            with pytest.raises(CheckpointError, match=message):
                paddle.static.load(main, path)
        assert_same(state_dict(), expected)


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
