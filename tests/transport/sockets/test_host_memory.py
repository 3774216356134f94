"""What ranks on GPUs send each other of the host's own memory does not pass through a card."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.transport import SocketTransport
from fleetpipe.transport.wire import bridge
from tests.transport.helpers import LIMIT, forward, sample


def test_bytes_of_files_stay_there(
    sockets: Callable[..., list[SocketTransport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    monkeypatch.setattr(bridge, "device_kind", lambda: "gpu")
    # NumPy's memory takes Python's lock when it is freed, for which CUDA's threads would wait.
    monkeypatch.setattr(bridge.dlpack, "from_dlpack", None)
    monkeypatch.setattr(bridge, "to_device", lambda x: moved.append(int(x.size)) or x)
    transports = sockets(2)
    job: Any = SimpleNamespace(timeout=LIMIT)
    one, other = (Ranks(DirectGroup(transport, LIMIT), job) for transport in transports)
    parts = [np.arange(n, dtype="uint8") for n in (3, 200, 0)]
    other.give(part.data for part in parts)
    received = [one.take(1) for _ in parts]
    assert [x.numpy().tobytes() for x in received] == [part.tobytes() for part in parts]
    assert moved == []
    transports[1].send(0, forward(0), sample("float32", [5]))
    transports[0].receive(1, forward(0), LIMIT)
    assert moved == [5]
