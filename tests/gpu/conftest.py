"""Every test here runs on a CPU that says it is a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.late_device import LateDevice, late_device
from tests.gpu.pretending import pretend


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process's CPU say that it is a GPU."""
    pretend(monkeypatch)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """A device that computes behind the host."""
    return late_device(monkeypatch)
