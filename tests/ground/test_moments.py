"""A call that comes too early or too late says so, and which call comes first."""

from __future__ import annotations

import pytest
from paddle import nn

from fleetpipe.dygraph.observe.timers import Timer
from fleetpipe.errors import StateError
from fleetpipe.fleet.meta_parallel import TensorParallel
from fleetpipe.paddle_api.device import device_kind


def test_what_needs_a_job_comes_after_fleet_init() -> None:
    if device_kind() == "cpu":
        with pytest.raises(StateError, match=r"fleet\.init"):
            TensorParallel(nn.Linear(2, 2))


def test_a_timer_starts_and_stops_by_turns() -> None:
    timer = Timer("forward")
    with pytest.raises(StateError, match="start it first"):
        timer.stop()
    timer.start()
    with pytest.raises(StateError, match="stop it first"):
        timer.start()
