"""Turns signals to the supervisor into a descriptor that ``select`` can wait for."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fleetpipe.systems import STOP_SIGNALS

#: Those that ask for the same, and after which the next one ends the job at once.
BREAK_SIGNALS = (signal.SIGINT,)


class Signals:
    """Reads the signals that have arrived from a socket."""

    def __init__(self, received: socket.socket) -> None:
        """Takes the socket into which Python writes the number of each signal."""
        self._received = received

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when a signal arrives."""
        return self._received.fileno()

    def take(self) -> list[int]:
        """Returns the signals since the last call."""
        with suppress(BlockingIOError):
            return list(self._received.recv(64))
        return []


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """While it is open, signals only go to the yielded :class:`Signals`. For the main thread."""
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
