"""The start of a job of several processes."""

from __future__ import annotations

import pytest

from fleetpipe.job import meeting
from tests.job.test_meeting import MemoryStore


class OpenedStore(MemoryStore):
    """The store that a process's first job opened."""

    def __init__(self, timeout: float) -> None:
        super().__init__()
        self.timeout = timeout


def test_a_later_job_waits_by_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_stores", [])
    monkeypatch.setattr(meeting, "open_store", OpenedStore)
    first = meeting.come_together(0, 60.0)
    assert first.timeout == 60.0
    # The port of rank 0 is taken: by the store that it serves itself.
    assert meeting.come_together(1, 5.0) is first
    assert first.timeout == 5.0
