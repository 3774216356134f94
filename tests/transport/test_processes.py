"""Two processes: this one is rank 0, a worker is rank 1."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paddle
import pytest

from fleetpipe.errors import PeerFailed
from fleetpipe.transport import SocketTransport, connect
from tests.transport.helpers import LIMIT, FolderStore, backward, forward, same, sample
from tests.transport.worker import LARGE

pytestmark = pytest.mark.processes


@contextmanager
def rank_0(folder: Path, what: str) -> Iterator[SocketTransport]:
    """Connects to a worker that does ``what``; afterwards the worker has ended."""
    command = [sys.executable, "-m", "tests.transport.worker", str(folder), what]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as worker:
        try:
            store = FolderStore(folder)
            transport = connect(rank=0, ranks=2, store=store, namespace="test", timeout=60.0)
            yield transport
            transport.close()
            worker.wait(LIMIT)
        finally:
            worker.kill()


def test_messages_between_processes(tmp_path: Path) -> None:
    with rank_0(tmp_path, "exchange") as transport:
        tensor = sample("float32", [30, 1000])
        tensor.stop_gradient = False
        for k in range(20):
            transport.send(1, forward(k), {"x": tensor + k})
            answer = transport.receive(1, backward(k), LIMIT)
            assert same(answer, {"twice": (tensor + k) * 2, "k": k})
        assert transport.announcements == 1
        assert same(transport.receive(1, backward(99), LIMIT), paddle.arange(LARGE))
        with pytest.raises(PeerFailed, match="rank 1 has left"):
            transport.receive(1, backward(100), LIMIT)


def test_a_killed_process_is_noticed_though_its_child_lives(tmp_path: Path) -> None:
    with rank_0(tmp_path, "killed") as transport:
        transport.send(1, forward(0), 0)
        begin = time.monotonic()
        with pytest.raises(PeerFailed, match="rank 1 is gone") as raised:
            transport.receive(1, backward(3), LIMIT)
        assert time.monotonic() - begin < LIMIT / 2
        assert "B of edge 0>1, micro-batch 3 from rank 1 to rank 0" in str(raised.value)


def test_an_uncaught_error_reaches_the_other_rank(tmp_path: Path) -> None:
    with rank_0(tmp_path, "failed") as transport:
        transport.send(1, forward(0), 0)
        with pytest.raises(PeerFailed, match="rank 1 has left: ValueError: out of data"):
            transport.receive(1, backward(0), LIMIT)
