"""What a step and an instruction took, with a clock of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from fleetpipe.engine import step_meter
from fleetpipe.engine.observer import Blocked, Stopwatch
from fleetpipe.engine.step_meter import StepMeter
from fleetpipe.job.records import RunProgress
from fleetpipe.schedules import Action, Recv, Send, build
from fleetpipe.schedules.action import ranks_of
from fleetpipe.transport import MessageKey
from tests.fixtures import Clock, Patch

pytestmark = pytest.mark.once


class Played:
    """Rank 1 of the pipeline."""

    rank = 1

    def __init__(self) -> None:
        self.values: dict[MessageKey, object] = {}


def test_waits_are_left_out_and_messages_waited_for_are_counted(monkeypatch: Patch) -> None:
    clock = Clock(monkeypatch)
    plan = build("1F1B", ranks=2, micro_batches=2).lower()
    meter = StepMeter(plan, [4, 6], RunProgress())
    calls = 0

    def work() -> None:
        clock.sleep(0.02)

    def blocked_once() -> Blocked | None:
        nonlocal calls
        calls += 1
        return Blocked(0, None) if calls % 2 else None  # type: ignore[arg-type]

    program = []
    for op in plan.ops[1]:
        if isinstance(op, Recv):
            assert ranks_of(op, plan.placement) == (0, 1)
            program.append(meter.wrap(Played(), op, blocked_once))
        elif isinstance(op, (Action, Send)):
            program.append(meter.wrap(Played(), op, work))
    for _ in range(2):
        meter.begin()
        for instruction in program:
            while instruction() is not None:
                clock.sleep(0.05)
        clock.sleep(0.03)
        times = meter.take()
    # Four actions and a send between them; the last send is behind the last action.
    # A collection of garbage, by another clock, is left out.
    assert times.wall == pytest.approx(0.1, abs=5e-3)
    assert times.cpu == 0
    assert times.awaited == {4: 2}


def test_what_passes_between_steps_goes_to_the_next(monkeypatch: Patch) -> None:
    clock = Clock(monkeypatch)
    plan = build("1F1B", ranks=2, micro_batches=2).lower()
    meter = StepMeter(plan, [0, 1], RunProgress())
    meter.begin()
    assert meter.take().data == 0
    clock.sleep(0.05)
    meter.begin()
    assert meter.take().data == pytest.approx(0.05)


@pytest.mark.parametrize(("micro_batches", "probes"), [(2, 4), (8, 8), (9, 6), (50, 8)])
def test_probes_run_behind_some_actions_and_are_no_part_of_them(
    monkeypatch: Patch, micro_batches: int, probes: int
) -> None:
    plan = build("FThenB", ranks=2, micro_batches=micro_batches).lower()
    actions = [op for op in plan.ops[1] if isinstance(op, Action)]
    monkeypatch.setattr(step_meter, "_ADDITIONS", 100_000)
    for wanted in (True, False):
        meter = StepMeter(plan, [0, 1], RunProgress(), wanted)
        program = [meter.wrap(Played(), op, lambda: None) for op in actions]
        meter.begin()
        before = time.thread_time()
        for instruction in program:
            instruction()
        spent = time.thread_time() - before
        times = meter.take()
        assert len(meter._probes) == (probes if wanted else 0)
        if wanted:
            assert probes * times.probe == pytest.approx(spent, rel=0.6)
        else:
            assert times.probe == 0
        # The probes are no part of it.
        assert not wanted or times.cpu < 0.5 * spent


BLOCKED = Blocked(0, MessageKey("F", 0, 1, "", 0))


def test_the_wait_of_an_instruction_that_is_called_again_is_a_part_of_it() -> None:
    ticks = iter(range(100))
    answers: Iterator[Blocked | None] = iter([None, BLOCKED, BLOCKED, None, None])
    runs: list[tuple[float, float]] = []
    watch = Stopwatch(
        lambda: next(answers), lambda begin, end: runs.append((begin, end)), lambda: next(ticks)
    )
    assert [watch() for _ in range(5)] == [None, BLOCKED, BLOCKED, None, None]
    # The second run reads the clock when it begins and when it is done, and not between.
    assert runs == [(0, 1), (2, 3), (4, 5)]


def test_a_run_that_fails_is_not_counted_and_the_next_begins_anew() -> None:
    ticks = iter(range(100))
    runs: list[tuple[float, float]] = []
    answers = iter([BLOCKED, ZeroDivisionError(), None])

    def run() -> Blocked | None:
        answer = next(answers)
        if isinstance(answer, ZeroDivisionError):
            raise answer
        return answer

    watch = Stopwatch(run, lambda begin, end: runs.append((begin, end)), lambda: next(ticks))
    watch()
    with pytest.raises(ZeroDivisionError):
        watch()
    watch()
    assert runs == [(1, 2)]
