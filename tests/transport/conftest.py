"""Connected transports, closed when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle
import pytest

from fleetpipe.transport import MemoryHub, SocketTransport, Transport
from tests import hidden_names
from tests.fixtures import Patch
from tests.transport.helpers import join_all


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: Patch) -> None:
    paddle.set_device("cpu")
    if hidden_names.SYSTEM:  # no launcher gives these ranks the address of a host without identity
        monkeypatch.setenv("FLEETPIPE_ADDRESS", "127.0.0.1")


@pytest.fixture
def sockets(monkeypatch: Patch) -> Iterator[Callable[..., list[SocketTransport]]]:
    """Joins ranks that are threads: ``sockets(3, force_tcp=True)``."""
    monkeypatch.setattr("fleetpipe.transport.sockets.CLOSING_SECONDS", 1.0)
    made: list[SocketTransport] = []

    def join(ranks: int, **options: Any) -> list[SocketTransport]:
        joined = join_all(ranks, **options)
        made.extend(joined)
        return joined

    yield join
    for transport in made:
        transport.close()


@pytest.fixture(params=["memory", "unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Transport]]:
    """Two connected ranks, over each transport in turn."""
    if request.param == "memory":
        hub = MemoryHub(2)
        transports: list[Transport] = [hub.endpoint(0), hub.endpoint(1)]
    else:
        transports = list(join_all(2, force_tcp=request.param == "tcp"))
    yield transports
    for transport in transports:
        transport.close()
