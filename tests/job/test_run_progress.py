"""A rank's account of its steps, which another thread reads while they go on."""

from __future__ import annotations

from collections import deque

import pytest

from fleetpipe.job import run_progress
from fleetpipe.job.run_progress import RunProgress
from tests.fixtures import Patch

pytestmark = pytest.mark.no_paddle


def test_a_save_that_ends_while_a_record_is_made_has_no_age_below_zero(
    monkeypatch: Patch,
) -> None:
    """The other ranks refuse such a record, and the job ended with it."""
    progress = RunProgress()
    clock = iter(range(100, 200))
    monkeypatch.setattr(run_progress.time, "monotonic", lambda: float(next(clock)))
    with progress.saving(1):
        pass

    def saved_meanwhile() -> tuple[int, int]:
        with progress.saving(2):
            pass
        return 0, 0

    progress.queues = saved_meanwhile
    record = progress.record(0, "F0.0", with_rows=True)
    assert (record.saved, record.saved_age) == (1, 1.0)
    assert progress.record(0, "F0.0", with_rows=False).saved == 2


def test_a_norm_on_a_card_is_read_now_and_then_and_never_by_who_asks(monkeypatch: Patch) -> None:
    progress = RunProgress()
    read: list[float] = []

    def told(now: float, waits: bool) -> tuple[float | None, bool]:
        def norm() -> float:
            read.append(now)
            return now

        monkeypatch.setattr(run_progress.time, "monotonic", lambda: now)
        progress.tell_norm(norm, waits)
        before = len(read)
        shown = progress.record(0, "", with_rows=False).gradient_norm
        return shown, len(read) > before

    assert told(100.0, waits=False) == (100, True)
    seen = [told(now, waits=True) for now in (101.0, 101.5, 102.5)]
    assert seen == [(101, False), (101, False), (102.5, False)]
    assert read == [100, 101, 102.5]


class Loss:
    """What a step computed: a Tensor has as much."""

    def __init__(self, *values: float) -> None:
        self.shape, self.item = [len(values)], lambda: values[0]


def test_the_losses_of_a_step_are_kept_where_somebody_takes_them(monkeypatch: Patch) -> None:
    progress, times = RunProgress(), (0.0, 0.0, 0.0, 0.0, {}, 0.0)
    monkeypatch.setattr(run_progress.time, "monotonic", lambda: 5.0)
    progress.end_step(times)
    progress.figures = deque()
    for loss, waits in [
        (Loss(0.5), False),
        ([Loss(1.0), Loss(2.0)], True),
        (Loss(3.0), True),  # a card is waited for now and then
        (Loss(1.0, 2.0), False),
    ]:
        progress.tell_loss(loss, waits)
        progress.end_step(times)
    losses = [{"loss": 0.5}, {"loss 0": 1.0, "loss 1": 2.0}, {}, {}]
    rows = [(step, {**row, "step time": 0.0}) for step, row in enumerate(losses, 2)]
    assert list(progress.figures) == rows
