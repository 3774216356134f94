"""What actions, transfers and releases take is added up by stage, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from fleetpipe.dygraph.observe.measuring import ActionMeter
from fleetpipe.engine.observer import Blocked, Played
from fleetpipe.schedules import Action, Edge, Free, Op, Recv, Reduce, Send
from fleetpipe.transport import MessageKey

NOBODY = cast(Played, None)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        """Returns what it was set to."""
        return self.now


def test_a_batch_is_added_up_by_stage_and_the_median_of_batches_counts() -> None:
    clock = Clock()
    meter = ActionMeter("B", clock)

    def work() -> None:
        clock.now += seconds

    ops: list[Op] = [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Free(1, 0)]
    instructions = [meter.wrap(NOBODY, op, work) for op in ops]
    for seconds in (100.0, 1.0, 5.0, 2.0):
        for instruction in instructions:
            assert instruction() is None
        meter.end_batch(counts=seconds < 100)
    # A release counts with the backward.
    assert meter.seconds() == {("F", 1, 0): 4.0, ("B", 1, 0): 4.0}


def test_slices_are_added_up_one_by_one() -> None:
    clock = Clock()
    meter = ActionMeter("B", clock, units=2)

    def work() -> None:
        clock.now += 1

    ops: list[Op] = [Action("F", 0, 0), Action("F", 0, 1), Action("F", 0, 2), Free(0, 3)]
    for op in ops:
        meter.wrap(NOBODY, op, work)()
    meter.end_batch(counts=True)
    # The third is the first slice of the next micro-batch.
    assert meter.seconds() == {("F", 0, 0): 2.0, ("F", 0, 1): 1.0, ("B", 0, 1): 1.0}


def test_transfers_count_with_the_stage_that_does_them_without_their_wait() -> None:
    meter = ActionMeter("W", Clock())
    waits: Iterator[Blocked | None] = iter([Blocked(0, MessageKey("F", 0, 1, "", 0)), None])
    receive = meter.wrap(NOBODY, Recv("F", Edge(0, 1), 0), lambda: next(waits))
    assert receive() is not None
    assert receive() is None
    for op in (Send("F", Edge(0, 1), 0), Send("B", Edge(1, 2), 0), Recv("B", Edge(3, 4), 0)):
        meter.wrap(NOBODY, op, lambda: None)()
    meter.end_batch(counts=True)
    assert set(meter.seconds()) == {("R", 1, 0), ("S", 0, 0), ("S", 2, 0), ("R", 3, 0)}


def test_what_is_none_of_these_is_left_alone() -> None:
    def reduce() -> None:
        pass

    assert ActionMeter("B").wrap(NOBODY, Reduce(), reduce) is reduce
