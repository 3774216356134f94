"""What the wall time of steps, and of what lies between them, is spent on."""

from __future__ import annotations

from typing import Any

import pytest

from fleetpipe.job.records import BETWEEN, PARTS
from fleetpipe.job.run_progress import WallTime
from tests.fixtures import Clock, Patch

pytestmark = pytest.mark.no_paddle


class Process:
    """A process whose clock and waits a test sets."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.clock = Clock(monkeypatch)
        self.waited = 0.0
        self.wall_time = WallTime(lambda: self.waited)

    def work(self, seconds: float, waits: bool = False) -> None:
        self.clock.sleep(seconds)
        self.waited += seconds * waits

    def step(self, compute: float, waiting: float = 0.0, measured: bool = True) -> None:
        self.wall_time.begin_step()
        self.work(compute)
        self.work(waiting, waits=True)
        self.wall_time.end_step(measured)

    def spent(self) -> dict[str, Any]:
        assert len(self.wall_time.seconds) == len(PARTS)
        return {
            part: pytest.approx(seconds, abs=1e-9)
            for part, seconds in zip(PARTS, self.wall_time.seconds)
            if seconds > 1e-9
        }


def test_all_wall_time_after_the_first_step_is_some_part(monkeypatch: Patch) -> None:
    process = Process(monkeypatch)
    process.work(7.0)
    process.step(5.0)
    assert process.spent() == {}
    spending = process.wall_time.spending
    with spending("data"):
        process.work(1.0)
    with spending("callbacks"):
        process.work(2.0)
        with spending("saves"):
            process.work(4.0)
            process.work(1.0, waits=True)
    process.work(0.5)
    process.work(0.25, waits=True)
    with spending("evaluation"):
        with spending("data"):
            process.work(8.0)
        process.work(3.0, waits=True)
    process.step(2.0, waiting=1.0)
    expected = {
        "compute": 2.0,
        "waiting": 1.25,
        "data": 1.0,
        "callbacks": 2.0,
        "evaluation": 11.0,
        "saves": 5.0,
        "other": 0.5,
    }
    assert process.spent() == expected
    assert sum(process.wall_time.seconds) == pytest.approx(22.75)
    assert dict(process.wall_time.between) == {part: expected[part] for part in BETWEEN}
    process.step(1.0)
    assert process.spent() == {**expected, "compute": 3.0}
    assert dict(process.wall_time.between) == dict.fromkeys(BETWEEN, 0.0)


def test_an_error_within_a_part_ends_it(monkeypatch: Patch) -> None:
    process = Process(monkeypatch)
    process.step(1.0)

    def load() -> None:
        with process.wall_time.spending("data"):
            process.work(1.0)
            assert process.wall_time.part == "data"
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        load()
    assert process.wall_time.part == ""
    process.step(1.0)
    assert process.spent() == {"compute": 1.0, "data": 1.0}


def test_steps_whose_card_is_not_waited_for_are_shared_out_as_the_measured_ones(
    monkeypatch: Patch,
) -> None:
    """The host queues the work in 0.1 s, and waits for it in the script, which reads the loss."""
    process = Process(monkeypatch)
    process.step(0.9, waiting=0.1)
    process.work(0.25)
    process.step(0.1, measured=False)
    process.work(1.15)
    with process.wall_time.spending("saves"):
        process.work(5.0)
    process.step(0.1, measured=False)
    expected = {"compute": 1.6 * 0.72, "waiting": 1.6 * 0.08, "other": 1.6 * 0.2, "saves": 5.0}
    assert process.spent() == {part: pytest.approx(each) for part, each in expected.items()}
