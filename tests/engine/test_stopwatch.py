"""An instruction is timed from its first call to the end of the one that is not blocked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetpipe.engine.observer import Blocked
from fleetpipe.engine.stopwatch import Stopwatch
from fleetpipe.transport import MessageKey

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
