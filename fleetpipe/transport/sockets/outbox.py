"""The sending half of a connection: what the kernel takes at once needs no thread.

A hand-off to a Python thread costs more than a small message does, so bytes are sent on the
caller's thread without blocking. Only what the kernel's buffer does not take goes to a writer
thread, started when first needed, and while that has work everything else queues behind it.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Union

from fleetpipe import systems

Buffer = Union[bytes, memoryview]

# Linux and macOS take at most 1024 pieces in one call (IOV_MAX).
_MOST_PIECES = 1024


class _Entry(NamedTuple):
    """What the writer thread has to send, and what must stay alive meanwhile."""

    pieces: list[Buffer]
    nbytes: int
    kept: object


class Outbox:
    """Bytes on their way to one peer.

    Attributes:
        backlog: Bytes that the kernel has not taken yet.
        error: What ended the stream, or None.
    """

    def __init__(self, sock: socket.socket, wake: Callable[[], None]) -> None:
        """Sends on ``sock``.

        Args:
            sock: A connected stream socket, which from here on never blocks.
            wake: Called from the writer thread when a waiter asked to be told of progress.
        """
        # Not by a flag of each call: macOS heeds MSG_DONTWAIT only where it receives.
        sock.setblocking(False)
        self.backlog = 0
        self.error: OSError | None = None
        self._sock = sock
        self._wake = wake
        self._wanted = False
        # None, when reached, ends the writer thread.
        self._queue: deque[_Entry | None] = deque()
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None

    def put(self, pieces: Sequence[Buffer], nbytes: int, keep: Callable[[], object]) -> None:
        """Sends pieces in order, behind what was put before; never blocks.

        Args:
            pieces: The bytes, gathered by the kernel without being joined.
            nbytes: Bytes of all pieces.
            keep: Returns what must stay alive until the kernel has taken them; only called where
                it does not take them at once.

        Raises:
            OSError: The stream has ended.
        """
        sent = 0
        if not self.backlog and self.error is None:
            sent = self._send_at_once(pieces)
            if sent == nbytes:
                return
        with self._changed:
            if self.error is not None:
                raise self.error
            self._queue.append(_Entry(_after(pieces, sent), nbytes - sent, keep()))
            self.backlog += nbytes - sent
            self._changed.notify()
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write, name="fleetpipe-writer", daemon=True
            )
            self._writer.start()

    def ask(self) -> None:
        """Asks for one call of ``wake`` when the backlog next shrinks."""
        with self._changed:
            self._wanted = True

    def close(self) -> None:
        """Ends the writer thread; the socket must have been shut down."""
        with self._changed:
            self._queue.append(None)
            self._changed.notify()
        if self._writer is not None:
            self._writer.join()

    def _send_at_once(self, pieces: Sequence[Buffer]) -> int:
        total = 0
        while True:
            try:
                sent = systems.send_pieces(self._sock, pieces[:_MOST_PIECES])
            except BlockingIOError:
                return total
            except OSError as error:
                self.error = error
                raise
            total += sent
            if len(pieces) <= _MOST_PIECES:
                return total
            pieces = _after(pieces, sent)

    def _write(self) -> None:
        while self.error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                entry = self._queue[0]
            if entry is None:
                return
            error = None
            try:
                self._send_all(entry.pieces)
            except OSError as raised:
                error = raised
            self._count_out(entry, error)

    def _count_out(self, entry: _Entry, error: OSError | None) -> None:
        with self._changed:
            self.error = error
            if error is None:
                self._queue.popleft()
                self.backlog -= entry.nbytes
            else:
                self._queue.clear()
                self.backlog = 0
            wanted, self._wanted = self._wanted, False
        if wanted:
            self._wake()

    def _send_all(self, pieces: list[Buffer]) -> None:
        left: Sequence[Buffer] = pieces
        while left:
            try:
                left = _after(left, systems.send_pieces(self._sock, left[:_MOST_PIECES]))
            except BlockingIOError:
                with selectors.DefaultSelector() as selector:
                    selector.register(self._sock, selectors.EVENT_WRITE)
                    selector.select()


def _after(pieces: Sequence[Buffer], sent: int) -> list[Buffer]:
    """Returns what is left of ``pieces`` after their first ``sent`` bytes."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[index + 1 :]]
        sent -= len(piece)
    return []
