"""The types of fixtures, by short names."""

from __future__ import annotations

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
