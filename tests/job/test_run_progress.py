"""A rank's account of its steps, which another thread reads while they go on."""

from __future__ import annotations

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
