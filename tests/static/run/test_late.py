"""A static pipeline has its bits over the late and poisoned transport, split backward too."""

from __future__ import annotations

import pytest

from tests.static.networks import mlp, strategy_of
from tests.static.run.test_training import compare, momentum
from tests.transport.late import stand_in

pytestmark = pytest.mark.once


@pytest.mark.parametrize("schedule", ["F-then-B", "1F1B", "ZBH1"])
def test_a_static_pipeline(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs = stand_in(monkeypatch)
    compare(mlp(3, norm=True), momentum, strategy_of(schedule))
    assert hubs
