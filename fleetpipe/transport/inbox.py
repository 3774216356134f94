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

STAGE_BYTES = 1 << 14
# To allocate the tensor of a small message takes 15 to 30 us between a forward and a backward, as
# neither code nor data are in the caches, and 5 us right after another: so several are allocated.
_SMALL = 1 << 14
_MOST_SPARE = 8

_UNKNOWN = MessageKey("C", 0, 0, "", 0)


class _Frame:
    """A message whose header has been read.

    Attributes:
        header: The header.
        call: The number of its sender's call.
        sent: When it was sent, in nanoseconds of the sender's clock.
        key: The message's key, ``_UNKNOWN`` until the channel is known.
        structure: The structure of the value, ``NOTHING`` until it is known.
        tensors: The tensors being filled.
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
        self.header = header
        self.call = call
        self.sent = sent
        self.key = _UNKNOWN
        self.structure = NOTHING
        self.tensors: list[Any] = []
        self.announcement = bytearray(header.announcement)
        self.targets: list[memoryview] = []
        self.sealed: list[memoryview] = []

    def words(self) -> str:
        """Describes the message in words, as far as its header is known."""
        if self.key is not _UNKNOWN:
            return describe(self.key)
        kind, source, target = chr(self.header.kind), self.header.source, self.header.target
        return describe(MessageKey(kind, source, target, "", self.header.micro_batch))


class _Channel:
    """The structure that a peer has announced for the values of one kind, edge and name.

    Attributes:
        key: Kind, source, target and name.
        header: The expected header of each message: kind, source, target, structure, payload.
        structure: The structure of each value.
        spare: Tensors and their memory, allocated before their messages come.
    """

    def __init__(self, header: Header, name: str, structure: Structure) -> None:
        self.key = (chr(header.kind), header.source, header.target, name)
        self.header = (*header[1:4], header.structure, structure.nbytes)
        self.structure = structure
        self.spare: list[tuple[list[Any], list[memoryview]]] = []
        self._most_spare = 1

    def prepare(self) -> None:
        """Allocates the tensors for one message, or for several after many small ones."""
        self.spare += bridge.allocate_several(self.structure.leaves, self._most_spare)
        if self.structure.nbytes <= _SMALL:
            self._most_spare = min(2 * self._most_spare, _MOST_SPARE)


class Inbox:
    """The messages that have come from one peer.

    Attributes:
        damage: The error that ended the stream, if the stream itself was damaged.
        ended: Why no more messages can come; "" as long as they can.
        orderly: Whether the peer said goodbye before the end.
        reason: Why the peer left, if it said so.
        nbytes: Bytes of the messages that are stored for later.
        delay: While this end waits for messages: how long it was ready to run without getting a
            processor; else None.
    """

    def __init__(self, sock: socket.socket, peer: int, seal: Seal | None = None) -> None:
        """Reads the messages of rank ``peer`` from ``sock``, a connected stream socket.

        Args:
            sock: The socket.
            peer: The peer.
            seal: The seal of the peer's parts; None without a secret.
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
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._begin = 0
        self._end = 0
        self._frame: _Frame | None = None
        self._channels: dict[int, _Channel] = {}
        self._by_key: dict[tuple[Any, ...], _Channel] = {}
        self._kept: dict[MessageKey, deque[tuple[Any, int, int]]] = {}
        self._quickest: tuple[bool, int, float] | None = None

    @property
    def messages(self) -> int:
        """Number of keys with messages stored for later; any thread may ask."""
        return len(self._kept)

    def flight(self) -> float | None:
        """Returns how long messages between stages took to arrive, and starts a new measurement.

        It is the shortest time of the largest messages that this end waited for since the last
        call: the time of small ones says little, and a message that comes while this end computes
        is noticed late. If it waited for none, the shortest time of all is returned.

        Returns:
            Seconds, by the clocks of both ends, which may differ; None if no message came.
        """
        quickest, self._quickest = self._quickest, None
        return None if quickest is None else quickest[2]

    def take(self, key: MessageKey) -> tuple[bool, Any, int]:
        """Returns (True, value, call) of the oldest message of ``key``; reads what has arrived.

        Raises:
            TransportError: The stream is damaged.
        """
        kept = self._kept.get(key)
        if kept is not None:
            value, nbytes, call = kept.popleft()
            self.nbytes -= nbytes
            if not kept:
                del self._kept[key]
            return True, value, call
        while True:
            frame = self._next()
            if frame is None:
                return False, None, 0
            if frame.key == key:
                return True, _value(frame), frame.call
            self._keep(frame)

    def has(self, key: MessageKey) -> bool:
        """Whether a message of ``key`` is stored."""
        return key in self._kept

    def prepare(self, key: MessageKey) -> None:
        """Allocates the tensors of an awaited message while this rank has nothing else to do."""
        channel = self._by_key.get(key[:4])
        if channel is not None and not channel.spare:
            channel.prepare()

    def fill(self, limit: int) -> None:
        """Reads and stores messages that have arrived, until ``limit`` bytes are stored.

        Raises:
            TransportError: The stream is damaged.
        """
        while self.nbytes < limit:
            frame = self._next()
            if frame is None:
                return
            self._keep(frame)

    def summary(self) -> str:
        """Describes in words the stored messages and the half-read one."""
        parts = [f"{len(kept)} x {describe(key)}" for key, kept in list(self._kept.items())[:4]]
        if len(self._kept) > 4:
            parts.append(f"{len(self._kept) - 4} others")
        if self._frame is not None:
            parts.append(f"a part of {self._frame.words()}")
        return ", ".join(parts) or "nothing that was not received before"

    def _keep(self, frame: _Frame) -> None:
        nbytes = frame.header.payload
        self._kept.setdefault(frame.key, deque()).append((_value(frame), nbytes, frame.call))
        self.nbytes += nbytes

    def _next(self) -> _Frame | None:
        """Returns the next complete message, or None if the rest of it has not arrived."""
        if self.damage is not None:
            raise self.damage
        try:
            return self._advance()
        except TransportError as error:
            words = "the stream between messages" if self._frame is None else self._frame.words()
            self.damage = TransportError(
                f"rank {self._peer} sent bytes that are no message",
                where=f"{words} from rank {self._peer}",
                got=str(error),
                cause="another program or version at the other end, or memory damage there",
                fix=f"read the log of rank {self._peer}; run the same fleetpipe on every host",
            )
            self.ended = "its stream was damaged"
            raise self.damage from error

    def _advance(self) -> _Frame | None:
        while True:
            frame = self._frame or self._begin_frame()
            if frame is None:
                return None
            self._pour(frame)
            if frame.targets:
                if not self._read(frame):
                    return None
                continue
            if frame.sealed and self._seal is not None:
                self._seal.check(frame.sealed[:-1], frame.sealed[-1])
                frame.sealed = []
            if frame.header.frame == GOODBYE:
                self.orderly = True
                self.reason = frame.announcement.decode("utf-8", "replace")
                self._frame = None
            elif frame.structure is NOTHING:
                self._learn(frame)
            else:
                self._frame = None
                self._time(frame)
                return frame

    def _time(self, frame: _Frame) -> None:
        """Notes how long a message between stages took, for :meth:`flight`."""
        if frame.key.kind not in CONTROL:
            flight = (time.monotonic_ns() - frame.sent) / 1e9 - (self.delay or 0.0)
            timed = self.delay is None, -frame.header.payload, flight
            self._quickest = timed if self._quickest is None else min(self._quickest, timed)

    def _begin_frame(self) -> _Frame | None:
        """Reads the next header; returns its message, None if the header has not arrived."""
        while self._end - self._begin < self._header_bytes:
            if not self._read(None):
                return None
        end = self._begin + HEADER_BYTES
        if self._seal is not None:
            seal = self._stage[end : end + SEAL_BYTES]
            self._seal.check([self._stage[self._begin : end]], seal)
        frame = self._frame = _Frame(*unpack_header(bytes(self._stage[self._begin : end])))
        self._begin += self._header_bytes
        if frame.header.announcement:
            self._expect(frame, [memoryview(frame.announcement)])
        elif frame.header.frame != GOODBYE:
            self._open(frame)
        return frame

    def _expect(self, frame: _Frame, memories: list[memoryview]) -> None:
        """Sets ``memories`` as the destination of the next part of the stream and of its seal."""
        frame.targets = memories[::-1]
        if self._seal is not None and memories:
            frame.sealed = [*memories, memoryview(bytearray(SEAL_BYTES))]
            frame.targets.insert(0, frame.sealed[-1])

    def _learn(self, frame: _Frame) -> None:
        """Stores the structure that a channel has from this message on."""
        header = frame.header
        name, structure = decode(bytes(frame.announcement))
        channel = _Channel(header, name, structure)
        self._channels[header.channel] = self._by_key[channel.key] = channel
        self._open(frame)

    def _open(self, frame: _Frame) -> None:
        """Allocates the tensors of a message, which the stream then fills."""
        header = frame.header
        channel = self._channels.get(header.channel)
        said = (*header[1:4], header.structure, header.payload)
        if channel is None or said != channel.header:
            raise TransportError(
                "a message does not fit what was announced for its channel",
                expected=f"(kind, source, target, structure, bytes) = {channel and channel.header}",
                got=str(said),
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
        self._expect(frame, memories)

    def _pour(self, frame: _Frame) -> None:
        """Moves bytes from the staging buffer to their destination."""
        while frame.targets and self._begin < self._end:
            target = frame.targets[-1]
            count = min(len(target), self._end - self._begin)
            target[:count] = self._stage[self._begin : self._begin + count]
            self._begin += count
            if count == len(target):
                frame.targets.pop()
            else:
                frame.targets[-1] = target[count:]

    def _read(self, frame: _Frame | None) -> bool:
        """Reads once from the socket; returns False if nothing has arrived or it has ended."""
        if self.ended:
            return False
        target = None if frame is None else frame.targets[-1]
        if target is None or len(target) < STAGE_BYTES:
            if self._begin:
                rest = bytes(self._stage[self._begin : self._end])
                self._stage[: len(rest)] = rest
                self._begin, self._end = 0, len(rest)
            target = None
        try:
            count = self._sock.recv_into(self._stage[self._end :] if target is None else target)
        except BlockingIOError:
            return False
        except OSError as error:
            self.ended = f"its connection broke ({error.strerror or error})"
            return False
        if not count:
            self.ended = self._how_it_closed()
        elif target is None or frame is None:
            self._end += count
        elif count == len(target):
            frame.targets.pop()
        else:
            frame.targets[-1] = target[count:]
        return count > 0

    def _how_it_closed(self) -> str:
        if self.orderly:
            return "it closed its transport"
        if self._frame is None and self._begin == self._end:
            return "its connection closed"
        words = "header" if self._frame is None else self._frame.words()
        return f"its connection closed within a message, a truncated {words}"


def _value(frame: _Frame) -> Any:
    structure, tensors = frame.structure, frame.tensors
    if frame.key.kind != "H":
        tensors = bridge.on_device(tensors, structure.leaves)
    return structure.rebuild(tensors)
