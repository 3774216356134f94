"""The receiving half of a connection: it reads bytes into the memory of tensors.

Each read takes the bytes that have arrived and never waits. Headers and small payloads come through
one small staging buffer, so that a small message costs one system call; the rest of a large payload
is read straight into the memory of its tensor.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Any

from fleetpipe.errors import TransportError
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.structure import (
    CONTROL,
    GOODBYE,
    HEADER_BYTES,
    NOTHING,
    SEAL_BYTES,
    Header,
    MessageKey,
    Seal,
    Structure,
    decode,
    describe,
    unpack_header,
)

#: Bytes of the staging buffer.
STAGING_BYTES = 1 << 14
#: To allocate the tensor of a small message takes 15 to 30 us between a forward and a backward, as
#: neither code nor data are in the caches, and 5 us right after another: so the tensors of several
#: messages of at most so many bytes are allocated together.
_SMALL_BYTES = 1 << 14
#: The most messages for which tensors are allocated together.
_MOST_SPARE = 8

#: Stands for the key of a message that is not known yet.
_UNKNOWN = MessageKey("C", 0, 0, "", 0)


class _Frame:
    """A message whose header has been read and whose rest is being read.

    Attributes:
        header: The header.
        call: The kind of the sender's collective call, as the header's number.
        sent: When the message was sent, in nanoseconds of the sender's clock.
        key: The message's key, ``_UNKNOWN`` until the channel is known.
        structure: The structure of the value, ``NOTHING`` until it is known.
        tensors: The tensors whose memory the stream fills.
        announcement: The bytes of the announcement, or of the reason in a goodbye.
        targets: The memory still to be filled, in reverse order.
        sealed: The memory of the part that is being filled, then that of its seal; empty without
            seals.
    """

    __slots__ = (
        "announcement",
        "call",
        "header",
        "key",
        "sealed",
        "sent",
        "structure",
        "targets",
        "tensors",
    )

    def __init__(self, header: Header, call: int, sent: int) -> None:
        """Begins to read a message whose header has come.

        Args:
            header: The header.
            call: The kind of the sender's collective call, as the header's number.
            sent: When the message was sent, in nanoseconds of the sender's clock.
        """
        self.header = header
        self.call = call
        self.sent = sent
        self.key = _UNKNOWN
        self.structure = NOTHING
        self.tensors: list[Any] = []
        self.announcement = bytearray(header.announcement)
        self.targets: list[memoryview] = []
        self.sealed: list[memoryview] = []

    def description(self) -> str:
        """Returns the message in words, as far as its header is known."""
        if self.key is not _UNKNOWN:
            return describe(self.key)
        kind, source, target = chr(self.header.kind), self.header.source, self.header.target
        return describe(MessageKey(kind, source, target, "", self.header.micro_batch))


class _Channel:
    """The structure that a peer has announced for the values of one kind, edge and name.

    Attributes:
        key: Kind, source, target and name.
        header: The header fields that each message must have: kind, source, target, structure,
            payload.
        structure: The structure of each value.
        spare: For each of the next messages, as far as they are allocated: its tensors, and their
            memory.
    """

    def __init__(self, header: Header, name: str, structure: Structure) -> None:
        """Stores the structure that ``header`` announces for the edge ``name``."""
        self.key = (chr(header.kind), header.source, header.target, name)
        self.header = (*header[1:4], header.structure, structure.nbytes)
        self.structure = structure
        self.spare: list[tuple[list[Any], list[memoryview]]] = []
        #: The number of messages for which the next call of :meth:`prepare` allocates.
        self._next_count = 1

    def prepare(self) -> None:
        """Allocates the tensors of the next message; of several at once if messages are small.

        Small messages of one structure usually follow each other: each call allocates for twice as
        many of them as the call before, up to ``_MOST_SPARE``.
        """
        self.spare += bridge.allocate_several(self.structure.leaves, self._next_count)
        if self.structure.nbytes <= _SMALL_BYTES:
            self._next_count = min(2 * self._next_count, _MOST_SPARE)


class Inbox:
    """Reads the messages of one peer from a socket, and stores those that come early.

    Attributes:
        damage: The error that ended the stream, if the stream itself was damaged.
        ended: Why no more messages can come; "" as long as they can.
        orderly: Whether the peer said goodbye before the end.
        reason: Why the peer left, if its goodbye says so; else "".
        nbytes: Bytes of the messages that are stored for later.
        delay: While this end waits for messages: the seconds for which it was ready to run without
            getting a processor; else None.
    """

    def __init__(self, sock: socket.socket, peer: int, seal: Seal | None = None) -> None:
        """Reads the messages of rank ``peer`` from ``sock``, a connected stream socket.

        Args:
            sock: The socket.
            peer: The rank at the other end.
            seal: Checks the seals of the parts that the peer sends; None without a secret.
        """
        self.damage: TransportError | None = None
        self.ended = ""
        self.orderly = False
        self.reason = ""
        self.nbytes = 0
        self.delay: float | None = None
        self._peer = peer
        self._sock = sock
        self._seal = seal
        self._header_bytes = HEADER_BYTES if seal is None else HEADER_BYTES + SEAL_BYTES
        #: The staging buffer, and the begin and end of the unread bytes in it.
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._begin = self._end = 0
        #: The message that is being read.
        self._frame: _Frame | None = None
        #: The channels by their number in headers, and by kind, source, target and name.
        self._channels: dict[int, _Channel] = {}
        self._by_key: dict[tuple[Any, ...], _Channel] = {}
        #: By key, the messages stored for later: the value, its bytes, and the kind of the sender's
        #: collective call, as a number.
        self._stored: dict[MessageKey, deque[tuple[Any, int, int]]] = {}
        #: The message that :meth:`flight` reports: whether it came while this end computed, minus
        #: its bytes, and its seconds. The smallest such tuple is the best measurement.
        self._quickest: tuple[bool, int, float] | None = None

    @property
    def messages(self) -> int:
        """Number of message keys that have stored messages; any thread may ask."""
        return len(self._stored)

    def flight(self) -> float | None:
        """Returns how long a message between stages took to arrive; then starts a new measurement.

        That is the shortest time of the largest messages that this end waited for since the last
        call: the time of small ones says little, and a message that comes while this end computes
        is noticed late. If this end waited for no message, it is the shortest time of all messages.

        Returns:
            Seconds from sending to arrival, by the clocks of both ends, which may differ; None if
            no message came.
        """
        quickest, self._quickest = self._quickest, None
        return None if quickest is None else quickest[2]

    def take(self, key: MessageKey) -> tuple[bool, Any, int]:
        """Takes the oldest message of a key, after reading what has arrived; never waits.

        Returns:
            (True, its value, the kind of its sender's collective call as a number) or, if there is
            none, (False, None, 0).

        Raises:
            TransportError: The stream is damaged.
        """
        queue = self._stored.get(key)
        if queue is not None:
            value, nbytes, call = queue.popleft()
            self.nbytes -= nbytes
            if not queue:
                del self._stored[key]
            return True, value, call
        while True:
            frame = self._next_message()
            if frame is None:
                return False, None, 0
            if frame.key == key:
                return True, _rebuild_value(frame), frame.call
            self._store(frame)

    def has(self, key: MessageKey) -> bool:
        """Returns whether a message of ``key`` is stored."""
        return key in self._stored

    def prepare(self, key: MessageKey) -> None:
        """Allocates the tensors of an awaited message while this rank has nothing else to do.

        It allocates nothing if tensors for the message are there, or its structure is unknown.
        """
        channel = self._by_key.get(key[:4])
        if channel is not None and not channel.spare:
            channel.prepare()

    def fill(self, limit: int) -> None:
        """Reads the messages that have arrived, and stores them for later.

        Args:
            limit: Bytes of stored messages at which it stops to read.

        Raises:
            TransportError: The stream is damaged.
        """
        while self.nbytes < limit:
            frame = self._next_message()
            if frame is None:
                return
            self._store(frame)

    def summary(self) -> str:
        """Returns the stored messages and the half-read one in words, for error messages."""
        parts = [f"{len(queue)} x {describe(key)}" for key, queue in list(self._stored.items())[:4]]
        if len(self._stored) > 4:
            parts.append(f"{len(self._stored) - 4} others")
        if self._frame is not None:
            parts.append(f"a part of {self._frame.description()}")
        return ", ".join(parts) or "nothing that was not received before"

    def _store(self, frame: _Frame) -> None:
        """Stores a complete message for a later :meth:`take`."""
        nbytes = frame.header.payload
        queue = self._stored.setdefault(frame.key, deque())
        queue.append((_rebuild_value(frame), nbytes, frame.call))
        self.nbytes += nbytes

    def _next_message(self) -> _Frame | None:
        """Returns the next complete message; None if the rest of it has not arrived.

        Raises:
            TransportError: The stream is damaged, now or by an earlier message.
        """
        if self.damage is not None:
            raise self.damage
        try:
            return self._read_message()
        except TransportError as error:
            frame = self._frame
            part = "the stream between messages" if frame is None else frame.description()
            self.damage = TransportError(
                f"rank {self._peer} sent bytes that are no message",
                where=f"{part} from rank {self._peer}",
                got=str(error),
                cause="another program or version at the other end, or memory damage there",
                fix=f"read the log of rank {self._peer}; run the same fleetpipe on every host",
            )
            self.ended = "its stream was damaged"
            raise self.damage from error

    def _read_message(self) -> _Frame | None:
        """Reads on in the stream until a message is complete; None if its rest has not arrived."""
        while True:
            frame = self._frame or self._read_header()
            if frame is None:
                return None
            self._copy_staged(frame)
            if frame.targets:
                if not self._receive(frame):
                    return None
                continue
            # A part is complete: the announcement, the tensors, or the reason of a goodbye.
            if frame.sealed and self._seal is not None:
                self._seal.check(frame.sealed[:-1], frame.sealed[-1])
                frame.sealed = []
            if frame.header.frame == GOODBYE:
                self.orderly = True
                self.reason = frame.announcement.decode("utf-8", "replace")
                self._frame = None
            elif frame.structure is NOTHING:
                name, structure = decode(bytes(frame.announcement))
                channel = _Channel(frame.header, name, structure)
                self._channels[frame.header.channel] = self._by_key[channel.key] = channel
                self._allocate(frame)
            else:
                self._frame = None
                self._note_flight(frame)
                return frame

    def _note_flight(self, frame: _Frame) -> None:
        """Notes how long a complete message between stages took, for :meth:`flight`."""
        if frame.key.kind not in CONTROL:
            flight = (time.monotonic_ns() - frame.sent) / 1e9 - (self.delay or 0.0)
            timed = self.delay is None, -frame.header.payload, flight
            self._quickest = timed if self._quickest is None else min(self._quickest, timed)

    def _read_header(self) -> _Frame | None:
        """Reads the next header; returns its message, or None if the header has not arrived."""
        while self._end - self._begin < self._header_bytes:
            if not self._receive(None):
                return None
        end = self._begin + HEADER_BYTES
        if self._seal is not None:
            seal = self._staging[end : end + SEAL_BYTES]
            self._seal.check([self._staging[self._begin : end]], seal)
        frame = self._frame = _Frame(*unpack_header(bytes(self._staging[self._begin : end])))
        self._begin += self._header_bytes
        if frame.header.announcement:
            self._set_targets(frame, [memoryview(frame.announcement)])
        elif frame.header.frame != GOODBYE:
            self._allocate(frame)
        return frame

    def _set_targets(self, frame: _Frame, memories: list[memoryview]) -> None:
        """Makes the stream fill ``memories`` next, and then, with a secret, the memory of a seal.

        Args:
            frame: The message that is being read.
            memories: The memory of one part of it: its announcement, or its tensors.
        """
        frame.targets = memories[::-1]
        if self._seal is not None and memories:
            frame.sealed = [*memories, memoryview(bytearray(SEAL_BYTES))]
            frame.targets.insert(0, frame.sealed[-1])

    def _allocate(self, frame: _Frame) -> None:
        """Gives a message tensors, which the stream then fills.

        Raises:
            TransportError: The message does not fit its channel, or there is no memory for it.
        """
        header = frame.header
        channel = self._channels.get(header.channel)
        # As in :attr:`_Channel.header`.
        fields = (*header[1:4], header.structure, header.payload)
        if channel is None or fields != channel.header:
            raise TransportError(
                "a message does not fit what was announced for its channel",
                expected=f"(kind, source, target, structure, bytes) = {channel and channel.header}",
                got=str(fields),
                fix="install the same version of fleetpipe on every host",
            )
        frame.key = MessageKey(*channel.key, header.micro_batch)
        frame.structure = channel.structure
        try:
            if not channel.spare:
                channel.prepare()
        except Exception as error:  # Paddle raises all kinds
            raise TransportError(
                "there is no memory for the tensors that were announced, or no such dtype",
                got=f"{header.payload} bytes: {str(error)[:200]}",
                fix="cut a batch into smaller micro-batches, or give this rank more memory",
            ) from error
        frame.tensors, memories = channel.spare.pop()
        self._set_targets(frame, memories)

    def _copy_staged(self, frame: _Frame) -> None:
        """Copies bytes from the staging buffer to the targets of a message."""
        while frame.targets and self._begin < self._end:
            target = frame.targets[-1]
            count = min(len(target), self._end - self._begin)
            target[:count] = self._staging[self._begin : self._begin + count]
            self._begin += count
            if count == len(target):
                frame.targets.pop()
            else:
                frame.targets[-1] = target[count:]

    def _receive(self, frame: _Frame | None) -> bool:
        """Reads once from the socket, into the targets of ``frame`` or the staging buffer.

        Args:
            frame: The message whose rest is awaited; None for a header.

        Returns:
            False if nothing has arrived or the stream has ended.
        """
        if self.ended:
            return False
        # A small target is filled from the staging buffer, with whatever else has arrived.
        target = None if frame is None else frame.targets[-1]
        if target is None or len(target) < STAGING_BYTES:
            if self._begin:
                rest = bytes(self._staging[self._begin : self._end])
                self._staging[: len(rest)] = rest
                self._begin, self._end = 0, len(rest)
            target = None
        try:
            count = self._sock.recv_into(self._staging[self._end :] if target is None else target)
        except BlockingIOError:
            return False
        except OSError as error:
            self.ended = f"its connection broke ({error.strerror or error})"
            return False
        if not count:
            self.ended = self._describe_close()
        elif target is None or frame is None:
            self._end += count
        elif count == len(target):
            frame.targets.pop()
        else:
            frame.targets[-1] = target[count:]
        return count > 0

    def _describe_close(self) -> str:
        """Returns in words how the peer's end of the connection was closed."""
        if self.orderly:
            return "it closed its transport"
        if self._frame is None and self._begin == self._end:
            return "its connection closed"
        part = "header" if self._frame is None else self._frame.description()
        return f"its connection closed within a message, a truncated {part}"


def _rebuild_value(frame: _Frame) -> Any:
    """Returns the value of a complete message, with its tensors on the computing device."""
    structure, tensors = frame.structure, frame.tensors
    if frame.key.kind != "H":  # its tensors stay in the host's memory
        tensors = bridge.on_device(tensors, structure.leaves)
    return structure.rebuild(tensors)
