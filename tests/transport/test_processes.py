"""Two processes: this one is rank 0, a worker is rank 1."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import paddle
import pytest

from fleetpipe.errors import PeerFailed
from fleetpipe.paddle_api.distributed import open_tcp_store
from fleetpipe.transport import SocketTransport, connect
from tests.transport.helpers import LIMIT, backward, forward, free_port, same

pytestmark = pytest.mark.processes

WORKER = """
import os, sys, time
import paddle
from fleetpipe.paddle_api.distributed import open_tcp_store
from fleetpipe.transport import connect
from tests.transport.helpers import LIMIT, backward, forward

store = open_tcp_store("127.0.0.1", int(sys.argv[1]), False, 60)
transport = connect(rank=1, ranks=2, store=store, namespace="test", timeout=60.0)
transport.receive(0, forward(0), LIMIT)
"""
#: Dies with a child of it alive and well.
DIES = "if os.fork():\n    os.kill(os.getpid(), 9)\ntime.sleep(LIMIT)\nos._exit(0)"
#: Leaves a large message without closing, by an error that nobody catches.
RAISES = "transport.send(0, backward(0), paddle.arange(4 << 20))\nraise ValueError('out of data')"


@contextmanager
def rank_0(end: str) -> Iterator[SocketTransport]:
    """Connects to a worker that ends like this, and sends it a message."""
    port = free_port()
    store = open_tcp_store("127.0.0.1", port, True, 60)
    command = [sys.executable, "-c", WORKER + end, str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as worker:
        try:
            transport = connect(rank=0, ranks=2, store=store, namespace="test", timeout=60.0)
            transport.send(1, forward(0), 0)
            yield transport
            transport.close()
            worker.wait(LIMIT)
        finally:
            worker.kill()


def test_a_killed_process_is_noticed_though_its_child_lives() -> None:
    with rank_0(DIES) as transport:
        begin = time.monotonic()
        with pytest.raises(PeerFailed, match="rank 1 is gone") as raised:
            transport.receive(1, backward(3), LIMIT)
        assert time.monotonic() - begin < LIMIT / 2
        assert "B of edge 0>1, micro-batch 3 from rank 1 to rank 0" in str(raised.value)


def test_what_was_sent_before_an_uncaught_error_arrives_and_then_the_error() -> None:
    with rank_0(RAISES) as transport:
        assert same(transport.receive(1, backward(0), LIMIT), paddle.arange(4 << 20))
        with pytest.raises(PeerFailed, match="rank 1 has left: ValueError: out of data"):
            transport.receive(1, backward(1), LIMIT)
