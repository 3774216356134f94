"""Passes bytes between two sockets, each some seconds late: a network of a chosen latency.

    python relay.py FIRST SECOND

The descriptors are inherited. A line on the standard input is the latency from then on; its end
ends the relay.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque


def relay(first: int, second: int) -> None:
    """Passes bytes both ways until one side or the standard input ends."""
    to = {first: second, second: first}
    late: dict[int, deque[tuple[float, bytes]]] = {first: deque(), second: deque()}
    latency, commands = 0.0, sys.stdin.fileno()
    while True:
        due = [queue[0][0] for queue in late.values() if queue]
        left = None if not due else max(0.0, min(due) - time.monotonic())
        for source in select.select([first, second, commands], [], [], left)[0]:
            data = os.read(source, 1 << 16)
            if not data:
                return
            if source == commands:
                latency = float(data.split()[-1])
            else:
                late[to[source]].append((time.monotonic() + latency, data))
        now = time.monotonic()
        for target, queue in late.items():
            while queue and queue[0][0] <= now:
                data = queue.popleft()[1]
                while data:
                    data = data[os.write(target, data) :]


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):  # a network does not wait for a processor
        os.nice(-10)
    relay(*map(int, sys.argv[1:]))
