"""Kills the remaining processes of a Ray cluster when the process that started it has ended.

It runs as a script. Ray ends most of a cluster's processes, but two agents stay for a minute, and a
child of a worker may stay for ever. All of them have the cluster's token in their environment, and
no other process has it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    # Python runs it isolated (-I), without the path of the package.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from fleetpipe import systems

#: The script ends when no process with the token has been seen for so many seconds.
_QUIET_SECONDS = 1.0


def processes_with(token: bytes) -> Iterator[int]:
    """Yields the processes of this host that have ``token`` in their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token in path.read_bytes():
                yield int(path.parent.name)


def main() -> None:
    """Reads a token, waits for the sender to end, and kills the processes with the token."""
    token = sys.stdin.buffer.readline().strip()
    sys.stdin.buffer.read()
    quiet_until = time.monotonic() + _QUIET_SECONDS
    while time.monotonic() < quiet_until:
        for process in processes_with(token):
            with contextlib.suppress(OSError):
                os.kill(process, systems.SIGKILL)
                quiet_until = time.monotonic() + _QUIET_SECONDS
        time.sleep(0.1)


if __name__ == "__main__":
    # Ctrl-C and a scheduler's signals are for the job, whose end ends this process.
    for number in (signal.SIGINT, *systems.STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    main()
