"""A static run is recorded as one in dynamic graph is."""

from __future__ import annotations

import json
from pathlib import Path

import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.schedules import build
from tests.engine.test_trace import actions
from tests.static.networks import batches, mlp, static_mode, strategy_of


def test_a_trace_has_the_actions_of_the_schedule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with static_mode():
        strategy = strategy_of(trace=str(tmp_path / "new"))
        fleet.init(is_collective=True, strategy=strategy)
        loss = mlp(2)()[0]
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss)
        exe = paddle.static.Executor(paddle.CPUPlace())
        exe.run(paddle.static.default_startup_program())
        for feed in batches(2):
            exe.run(feed=feed, fetch_list=[loss])
    assert "trace of 2 of 2 steps" in caplog.text
    document = json.loads((tmp_path / "new" / "trace.json").read_text())
    rows = build("1F1B", ranks=2, micro_batches=4).actions
    assert actions(document, 2) == [[str(action) for action in row] * 2 for row in rows]
