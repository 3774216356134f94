"""What is asked of a card is asked of this process's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleetpipe.paddle_api import tensor, topology
from fleetpipe.paddle_api.device import process_bytes
from fleetpipe.paddle_api.tensor import to_device, to_host


def test_any_thread_is_told_of_the_memory_of_this_processs_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Unless it is told a device, Paddle asks for the thread's, in a new thread the first one.
    by_device = {None: 0, "gpu:0": 0, "gpu:3": 7 << 20}
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:3")
    monkeypatch.setattr(paddle.device.cuda, "memory_allocated", lambda of=None: by_device[of])
    assert process_bytes() == 7 << 20


def test_a_copy_for_the_host_waits_for_what_is_computed_and_for_no_other_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    alone: Any = SimpleNamespace(_copy_to=lambda _, blocking: calls.append(blocking))
    # Of a graph a PyLayer's part takes Python's lock where it goes, as it may in CUDA's threads.
    of_card: Any = SimpleNamespace(detach=lambda: alone)
    monkeypatch.setattr(tensor, "synchronize", lambda: calls.append("waited"))
    to_host(of_card)
    assert calls == [False, "waited"]


def test_static_mode_does_not_hide_the_device() -> None:
    copied_to: Any = SimpleNamespace(_copy_to=lambda place, blocking: place)
    paddle.enable_static()
    try:
        assert str(to_device(copied_to)) == str(paddle.CPUPlace())
    finally:
        paddle.disable_static()


@pytest.mark.parametrize("by_host", [False, True])
def test_the_card_that_paddles_start_chooses_stays(
    monkeypatch: pytest.MonkeyPatch, by_host: bool
) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(topology, "used_here", lambda: lambda: returned.append(True))
    monkeypatch.setattr(topology, "meets_by_host", lambda: by_host)
    with topology.beginning(lambda: None, lambda make: None):
        pass
    assert returned == [True] * by_host
