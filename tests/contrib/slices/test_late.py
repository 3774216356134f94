"""Slices over the late and poisoned transport have the bits of the single model."""

from __future__ import annotations

import pytest

from tests.contrib.slices import sliced
from tests.dygraph.train.test_schedules import check
from tests.transport.late import stand_in


def test_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    hubs = stand_in(monkeypatch)
    check(sliced.MODEL, 4, "Seq1F1B")
    assert hubs
