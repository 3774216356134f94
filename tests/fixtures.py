"""The types of fixtures, by short names; and a clock that tests set."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.launching import Finished

#: ``capsys`` and ``capfd``.
Capture = pytest.CaptureFixture[str]
LogCapture = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
#: ``on_ranks``.
Call = Callable[..., Any]
#: ``launch`` and ``launcher``.
Launch = Callable[..., Finished]


class Clock:
    """Seconds that pass where a test says so, in the place of all clocks; no thread computes."""

    def __init__(self, patch: Patch) -> None:
        self.now = 0.0
        for name in ("perf_counter", "monotonic"):
            patch.setattr(time, name, lambda: self.now)
        patch.setattr(time, "thread_time", lambda: 0.0)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
