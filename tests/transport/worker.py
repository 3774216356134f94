"""Rank 1 of the tests in test_processes.py: ``python -m tests.transport.worker FOLDER WHAT``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import paddle

from fleetpipe.transport import SocketTransport, connect
from tests.transport.helpers import LIMIT, FolderStore, backward, forward

LARGE = 4 << 20


def exchange(transport: SocketTransport) -> None:
    """Answers each message with its double, then leaves a large one without closing."""
    for k in range(20):
        value = transport.receive(0, forward(k), LIMIT)
        transport.send(0, backward(k), {"twice": value["x"] * 2, "k": k})
    transport.send(0, backward(99), paddle.arange(LARGE))


def killed(transport: SocketTransport) -> None:
    """Dies while a message waits for it, with a child of it alive and well."""
    transport.receive(0, forward(0), LIMIT)
    if os.fork() == 0:
        time.sleep(LIMIT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def failed(transport: SocketTransport) -> None:
    """Ends by an error that nobody catches."""
    transport.receive(0, forward(0), LIMIT)
    raise ValueError("out of data")


def main() -> None:
    folder, what = sys.argv[1:]
    paddle.set_device("cpu")
    store = FolderStore(Path(folder))
    transport = connect(rank=1, ranks=2, store=store, namespace="test", timeout=60.0)
    {"exchange": exchange, "killed": killed, "failed": failed}[what](transport)


if __name__ == "__main__":
    main()
