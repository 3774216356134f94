"""Neighbours on GPUs: the first transfer of a group makes NCCL's communicator, with both ranks."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleetpipe.job.groups import neighbours
from fleetpipe.job.groups.neighbours import directions
from fleetpipe.transport import SocketTransport
from tests.transport.conftest import sockets as sockets
from tests.transport.helpers import LIMIT, ThreadStore, forward, same, sample

#: A transfer that is over.
DONE = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
#: Seconds after which a rank gives up whose peer does not come.
PATIENCE = 1.0


class Communicator:
    """A group of two ranks: its first transfer blocks until both have come, later ones do not."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)
        self._made: set[int] = set()
        self._sent: queue.Queue[paddle.Tensor] = queue.Queue()

    def isend(self, tensor: paddle.Tensor) -> Any:
        self._begin()
        self._sent.put(tensor)
        return DONE

    def irecv(self, tensor: paddle.Tensor) -> Any:
        self._begin()
        source = self._sent.get(timeout=PATIENCE)
        nbytes = int(source.size) * source.element_size()
        ctypes.memmove(tensor.data_ptr(), source.data_ptr(), nbytes)
        return DONE

    def _begin(self) -> None:
        if threading.get_ident() not in self._made:
            self._both.wait(PATIENCE)
            self._made.add(threading.get_ident())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_that_all_send_first_do_not_wait_for_each_other(
    count: int, sockets: Callable[..., list[SocketTransport]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "device_kind", lambda: "gpu")
    monkeypatch.setattr(neighbours, "transfers", lambda made, _: (made.isend, made.irecv))
    groups = {direction: Communicator() for direction in directions(count)}
    connections, store = sockets(count), ThreadStore()
    everyone = threading.Barrier(count)

    def run(rank: int) -> bool:
        members, here = range(count), connections[rank]
        transport = neighbours.connect(here, members, groups, store, "test", LIMIT)
        peers = {(rank + step) % count for step in (1, -1)} - {rank}
        everyone.wait(LIMIT)
        for peer in peers:
            transport.send(peer, forward(rank), sample("float32", [2], seed=rank))
        received = [transport.receive(peer, forward(peer), LIMIT) for peer in peers]
        transport.flush(LIMIT)
        return all(same(x, sample("float32", [2], seed=p)) for x, p in zip(received, peers))

    with ThreadPoolExecutor(count) as threads:
        assert list(threads.map(run, range(count))) == [True] * count
