"""Limits of waits, on a clock that the tests turn; what the package offers without Paddle."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fleetpipe.transport
from fleetpipe.transport import limit as module
from fleetpipe.transport.limit import LOOK_SECONDS, STOPPED_SECONDS, Limit

pytestmark = pytest.mark.no_paddle


class Clock:
    """Stands in for the module ``time``."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_a_wait_that_looks_often_ends_in_time(clock: Clock) -> None:
    limit = Limit(5)
    naps = 0
    while not limit.reached():
        clock.now += limit.nap()
        naps += 1
    assert clock.now == 1005
    assert naps == 5 / LOOK_SECONDS


def test_time_in_which_the_process_was_stopped_does_not_count(clock: Clock) -> None:
    limit = Limit(60)
    for _ in range(9):
        clock.now += limit.nap()
    clock.now += 3600
    assert limit.left() == 60
    clock.now += STOPPED_SECONDS
    assert limit.left() == 60 - STOPPED_SECONDS


def test_nothing_is_slept_where_nothing_is_left(clock: Clock) -> None:
    limit = Limit(1)
    clock.now += 1.5
    assert limit.reached()
    assert limit.nap() == 0


def test_the_interface_loads_no_paddle() -> None:
    program = (
        "import sys; from fleetpipe.transport import MessageKey, Transport, Value, describe; "
        "sys.exit('paddle' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_is_there() -> None:
    for name in fleetpipe.transport.__all__:
        assert getattr(fleetpipe.transport, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'rendezvous_point'"):
        _ = fleetpipe.transport.rendezvous_point
