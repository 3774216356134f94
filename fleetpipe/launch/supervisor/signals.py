"""Signals to the supervisor, as something that can be waited for beside other things."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fleetpipe.systems import STOP_SIGNALS

#: Those that ask for the same, and after which the next one ends the job at once.
BREAK_SIGNALS = (signal.SIGINT,)


class Signals:
    """Signals that have come, read from a socket."""

    def __init__(self, received: socket.socket) -> None:
        """Reads from a socket into which Python writes the number of each signal."""
        self._received = received

    def fileno(self) -> int:
        """Returns the descriptor that can be read when a signal has come."""
        return self._received.fileno()

    def take(self) -> list[int]:
        """Returns the signals that have come since."""
        with suppress(BlockingIOError):
            return list(self._received.recv(64))
        return []


@contextmanager
def caught() -> Iterator[Signals]:
    """While it is open, the signals above do nothing but come here. For the main thread."""
    received, sent = socket.socketpair()
    numbers = (*STOP_SIGNALS, *BREAK_SIGNALS)
    before = {number: signal.getsignal(number) for number in numbers}
    with received, sent:
        received.setblocking(False)
        sent.setblocking(False)
        woken = signal.set_wakeup_fd(sent.fileno())
        for number in numbers:
            signal.signal(number, lambda *_: None)
        try:
            yield Signals(received)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)
