"""The start of a job of several processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleetpipe.job import start


def test_a_later_job_waits_by_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_store(timeout: float) -> Any:
        opened.append(SimpleNamespace(timeout=timeout))
        return opened[-1]

    monkeypatch.setattr(start, "_stores", [])
    monkeypatch.setattr(start.meeting, "open_store", open_store)
    first = start._job_store(60.0)
    # The port of rank 0 is taken: by the store that it serves itself.
    assert start._job_store(5.0) is first
    assert (first.timeout, len(opened)) == (5.0, 1)
