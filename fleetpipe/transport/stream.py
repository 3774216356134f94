"""Sends values to one peer over a socket, each as a frame of bytes, and receives the peer's.

The sending half needs no thread for what the kernel takes at once. A hand-off to a Python thread
costs more than a small message does, so bytes are sent on the caller's thread without blocking.
Only bytes that do not fit into the kernel's buffer go to a writer thread, which starts when first
needed; while it has work, later bytes queue behind them.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fleetpipe import systems
from fleetpipe.errors import PeerFailed, TransportError
from fleetpipe.transport.base import Value
from fleetpipe.transport.inbox import Inbox
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire import structure as message
from fleetpipe.transport.wire.bridge import Tensor, Unfit, take_apart
from fleetpipe.transport.wire.structure import Seals, Structure, encode

#: The most bytes of the reason in a goodbye.
LONGEST_REASON = 4096
#: The most bytes of messages that are read and dropped before a connection is closed.
DRAINED_AT_END = 1 << 24

Buffer = bytes | memoryview

#: The most bytes of a message whose pieces are joined before they are sent: for so few, that takes
#: less time than to have the kernel gather them.
_JOINED = 1 << 12
#: The most pieces that Linux and macOS take in one call (IOV_MAX).
_MOST_PIECES = 1024


class _Channel:
    """The messages of one kind, edge and name to the peer, and their last announced structure."""

    def __init__(self, number: int, fixed: tuple[str, int, int, str]) -> None:
        """Begins channel ``number`` for the messages of ``fixed``: kind, source, target, name."""
        kind, source, target, self.name = fixed
        self.fixed = (message.MESSAGE, ord(kind), source, target, number)
        self.announced = 0
        self.structure: Structure | None = None

    def header(
        self, key: message.MessageKey, structure: Structure, announcement: bytes, call: int
    ) -> bytes:
        """Returns the bytes of a message's header and announcement.

        Args:
            key: The message's key.
            structure: The structure of its value.
            announcement: The announcement of that structure, which the channel then remembers; b""
                if the peer knows the structure.
            call: The kind of the collective call in which it is sent, as a number.
        """
        if announcement:
            self.structure = structure
            self.announced += 1
        variable = (self.announced, key.micro_batch, len(announcement), structure.nbytes)
        try:
            return message.pack_header(self.fixed + variable, call) + announcement
        except (struct.error, TypeError):
            message.check_key(key)
            raise


class Connection:
    """Sends values to one peer over a socket, and receives the peer's.

    Attributes:
        peer: The peer's rank.
        inbox: The receiving half.
        outbox: The sending half.
        fd: The socket's file descriptor.
    """

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        peer: int,
        wake: Callable[[], None],
        seals: Seals | None = None,
    ) -> None:
        """Takes over a connected and authenticated socket and makes it non-blocking.

        Args:
            sock: The socket.
            rank: This rank.
            peer: The peer's rank.
            wake: Called from the writer thread when bytes have left: :meth:`Outbox.request_wake`.
            seals: Proofs of who sent each part of the stream, if the job has a secret.
        """
        self.peer = peer
        self.inbox = Inbox(sock, peer, None if seals is None else seals.incoming)
        self.outbox = Outbox(sock, wake)
        self.fd = sock.fileno()
        self._rank = rank
        self._sock = sock
        self._seal = None if seals is None else seals.outgoing
        self._channels: dict[tuple[Any, ...], _Channel] = {}

    def send(self, key: message.MessageKey, value: Value, call: int = 0) -> tuple[int, bool]:
        """Sends a value without waiting.

        Args:
            key: The message's key.
            value: The value.
            call: The kind of this rank's present collective call, as a number; 0 for none.

        Returns:
            The bytes of tensor data, and whether the structure had to be announced.

        Raises:
            BoundaryError: Something in the value cannot cross.
            PeerFailed: The stream has ended.
        """
        try:
            tree, tensors = take_apart(value)
        except Unfit as unfit:
            raise unfit.error(message.Route(key, self._rank, self.peer)) from None
        channel = self._channels.get(key[:4])
        if channel is None:
            message.check_key(key)
            channel = self._channels[key[:4]] = _Channel(len(self._channels), key[:4])
        announcement = b""
        structure = channel.structure
        if structure is None or structure.tree != tree:
            structure = Structure(tree)
            announcement = encode(
                channel.name, structure, message.Route(key, self._rank, self.peer)
            )
        tensors = bridge.plain(tensors)
        memories = bridge.memories(tensors, structure.leaves)
        head = channel.header(key, structure, announcement, call)
        try:
            self._send_frame(head, memories, len(head) + structure.nbytes, tensors)
        except OSError as error:
            raise self.failure(message.Route(key, self._rank, self.peer), error) from error
        return structure.nbytes, bool(announcement)

    def failure(self, route: message.Route, error: OSError | None = None) -> PeerFailed:
        """Returns the error that says why the connection to the peer has ended.

        Args:
            route: The message that could not be sent or received.
            error: The error of the socket; None if the inbox knows why the stream ended.
        """
        inbox = self.inbox
        if error is not None:
            # The peer's goodbye, with its reason, may have come before the break was noticed.
            with contextlib.suppress(TransportError):
                inbox.fill(DRAINED_AT_END)
        why = inbox.ended or (error and f"its connection broke ({error.strerror or error})")
        summary = f"rank {self.peer} is gone: {why}"
        if inbox.orderly:
            summary = f"rank {self.peer} has left" + (inbox.reason and f": {inbox.reason}")
        return PeerFailed(
            summary,
            where=str(route),
            got=f"from rank {self.peer}: {inbox.summary()}",
            cause=None
            if inbox.orderly
            else "its process died or was killed, or the network between the hosts failed",
            fix=f"read the log of rank {self.peer} first: its error came before this one",
        )

    def leave(self, reason: str) -> None:
        """Queues the goodbye, after which the peer expects no more messages.

        Args:
            reason: Why this rank leaves before its work is done; "" if its work is done.
        """
        text = reason.encode("utf-8", "replace")[:LONGEST_REASON]
        header = message.pack_header((message.GOODBYE, ord("C"), 0, 0, 0, 0, 0, len(text), 0))
        with contextlib.suppress(OSError):
            self._send_frame(header + text, [], len(header) + len(text), [])

    def close(self, limit: float) -> None:
        """Closes the socket and ends the writer thread; queued messages are dropped.

        Args:
            limit: Seconds to wait until the peer's host has received the bytes in the kernel.
        """
        # Bytes left unread would make TCP discard what is still on its way to the peer.
        with contextlib.suppress(TransportError):
            self.inbox.fill(DRAINED_AT_END)
        deadline = time.monotonic() + limit
        while self._has_unacknowledged_bytes() and time.monotonic() < deadline:
            time.sleep(0.001)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.outbox.close()
        self._sock.close()

    def abandon(self) -> None:
        """Closes this process's copy of the socket without a goodbye to the peer."""
        self._sock.close()

    def _send_frame(
        self, head: bytes, memories: list[memoryview], nbytes: int, tensors: list[Tensor]
    ) -> None:
        """Sends one message or goodbye.

        Args:
            head: The header and the announcement or reason after it.
            memories: The bytes of the tensors.
            nbytes: Bytes of all of these.
            tensors: The tensors that have these bytes, kept alive until they are sent.
        """
        pieces: list[Buffer] = [head, *memories]
        if self._seal is not None:
            header, rest = head[: message.HEADER_BYTES], head[message.HEADER_BYTES :]
            pieces = []
            for part in ([header], [rest] if rest else [], memories):
                if part:
                    pieces += [*part, self._seal.of(part)]
            nbytes = sum(map(len, pieces))
        if nbytes <= _JOINED:
            # Bytes of their own: no tensor has to stay alive for them.
            self.outbox.put([b"".join(pieces)], nbytes, list)
        else:
            self.outbox.put(pieces, nbytes, functools.partial(bridge.detach, tensors))

    def _has_unacknowledged_bytes(self) -> bool:
        """Returns whether the peer's host has not received all bytes that the kernel has taken.

        A unix-domain socket has delivered them already.
        """
        if self._sock.family == systems.AF_UNIX or self.outbox.error or self.inbox.ended:
            return False
        return systems.unacknowledged_bytes(self._sock) > 0


class _Unsent(NamedTuple):
    """Bytes that the writer thread has to send.

    Attributes:
        pieces: The bytes, in order.
        nbytes: Bytes of all pieces.
        kept: The objects that must stay alive until then.
    """

    pieces: list[Buffer]
    nbytes: int
    kept: object


class Outbox:
    """Sends bytes to one peer, and queues those that the kernel does not take.

    Attributes:
        backlog: Bytes that the kernel has not taken yet.
        error: The error that ended the stream, or None.
    """

    def __init__(self, sock: socket.socket, wake: Callable[[], None]) -> None:
        """Sends on ``sock``.

        Args:
            sock: A connected stream socket; it becomes non-blocking.
            wake: Called from the writer thread when bytes have left; see :meth:`request_wake`.
        """
        # Not by a flag of each call: on macOS MSG_DONTWAIT has no effect on sends.
        sock.setblocking(False)
        self.backlog = 0
        self.error: OSError | None = None
        self._sock = sock
        self._wake = wake
        self._wake_requested = False
        # A None ends the writer thread when its turn comes.
        self._queue: deque[_Unsent | None] = deque()
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None

    def put(self, pieces: Sequence[Buffer], nbytes: int, keep: Callable[[], object]) -> None:
        """Sends pieces in order, after the earlier ones; never blocks.

        Args:
            pieces: The bytes, gathered by the kernel without being joined.
            nbytes: Bytes of all pieces.
            keep: Returns the objects that must stay alive until the kernel has taken the pieces;
                called only if the kernel does not take them at once.

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
            self._queue.append(_Unsent(_skip_bytes(pieces, sent), nbytes - sent, keep()))
            self.backlog += nbytes - sent
            self._changed.notify()
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write, name="fleetpipe-writer", daemon=True
            )
            self._writer.start()

    def request_wake(self) -> None:
        """Requests one call of ``wake`` the next time that the writer thread has sent bytes."""
        with self._changed:
            self._wake_requested = True

    def close(self) -> None:
        """Ends the writer thread; the socket must have been shut down."""
        with self._changed:
            self._queue.append(None)
            self._changed.notify()
        if self._writer is not None:
            self._writer.join()

    def _send_at_once(self, pieces: Sequence[Buffer]) -> int:
        """Sends what the kernel takes without waiting; returns how many bytes that is."""
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
            pieces = _skip_bytes(pieces, sent)

    def _write(self) -> None:
        """Sends queued bytes on the writer thread until the stream ends or is closed."""
        # In a call for each entry, so that none stays alive during the wait for the next.
        while self.error is None and self._write_next():
            pass

    def _write_next(self) -> bool:
        """Waits for queued bytes and sends them; returns False if the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue)
            entry = self._queue[0]
        if entry is None:
            return False
        error = None
        try:
            self._send_all(entry.pieces)
        except OSError as raised:
            error = raised
        self._end_entry(entry, error)
        return True

    def _end_entry(self, entry: _Unsent, error: OSError | None) -> None:
        """Removes sent bytes from the queue, or all of it after an error, and wakes the waiter."""
        with self._changed:
            self.error = error
            if error is None:
                self._queue.popleft()
                self.backlog -= entry.nbytes
            else:
                self._queue.clear()
                self.backlog = 0
            requested, self._wake_requested = self._wake_requested, False
        if requested:
            self._wake()

    def _send_all(self, pieces: list[Buffer]) -> None:
        """Sends pieces, and waits where the kernel takes no more."""
        unsent: Sequence[Buffer] = pieces
        while unsent:
            try:
                unsent = _skip_bytes(unsent, systems.send_pieces(self._sock, unsent[:_MOST_PIECES]))
            except BlockingIOError:
                with selectors.DefaultSelector() as selector:
                    selector.register(self._sock, selectors.EVENT_WRITE)
                    selector.select()


def _skip_bytes(pieces: Sequence[Buffer], sent: int) -> list[Buffer]:
    """Returns what remains of ``pieces`` without their first ``sent`` bytes."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[index + 1 :]]
        sent -= len(piece)
    return []
