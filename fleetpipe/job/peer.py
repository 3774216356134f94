"""Stores what the watch knows of another rank, and exchanges the watch's messages with that rank.

A message is a length, a JSON object, and a seal. It is checked before it is used: anything else is
a ``ValueError``. An invalid record is only replaced by its error: the job can do without it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from fleetpipe import log, systems
from fleetpipe.errors import ConfigError
from fleetpipe.job.attempt_files import KINDS, Failure
from fleetpipe.job.records import MOST_ROWS, CollectiveCall, RankRecord, StepRow
from fleetpipe.json_value import JsonValue, Source, parse_small
from fleetpipe.transport.wire.structure import SEAL_BYTES, Seal, Seals

_LENGTH = struct.Struct("<I")
#: The most bytes of a message.
_LARGEST = 1 << 20
#: Deepest nesting, and number, of lists and objects in a message: those of a record with its rows.
_DEEPEST, _MOST_PARTS = 5, 6 + 3 * MOST_ROWS
_MOST_STRINGS = 40
_SOURCE = Source("this is no message of a rank", ConfigError, "give all ranks the same fleetpipe")

_log = log.logger(__name__)

#: A rank without a message for so many seconds counts as silent, and is sent no records, which
#: would fill its socket.
SILENT_SECONDS = 2.0


class Status(NamedTuple):
    """A message about what a rank is doing.

    Attributes:
        record: The rank's record; if it is invalid, the error that says so.
        call: The last collective call that the rank has begun.
    """

    record: RankRecord | ConfigError
    call: CollectiveCall


class Goodbye(NamedTuple):
    """The last message of a rank that leaves."""


def pack(message: dict[str, Any], seal: Seal | None) -> bytes:
    """Returns the bytes of a message, followed by its seal if the job has a secret."""
    text = json.dumps(message).encode()
    frame = _LENGTH.pack(len(text)) + text
    return frame if seal is None else frame + seal.of([frame])


def unpack(received: bytearray, seal: Seal | None) -> Iterator[Status | Failure | Goodbye]:
    """Removes the complete messages from received bytes, and yields them.

    Args:
        received: The bytes that have not been unpacked yet.
        seal: Checks the sender's seals; None without a secret.

    Raises:
        TransportError: A message does not have the seal of its sender.
        ValueError: The bytes are not a message.
    """
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        if length > _LARGEST:
            raise ValueError(f"a frame of {length} bytes")
        end = _LENGTH.size + length
        whole = end if seal is None else end + SEAL_BYTES
        if len(received) < whole:
            return
        frame = bytes(received[:end])
        if seal is not None:
            seal.check([frame], received[end:whole])
        del received[:whole]
        text = frame[_LENGTH.size :]
        yield _parse_message(parse_small(text, _DEEPEST, _MOST_PARTS, _MOST_STRINGS))


def _parse_message(content: Any) -> Status | Failure | Goodbye:
    """Returns the message of a JSON object.

    Raises:
        ConfigError: The object is not a message.
    """
    value = JsonValue(content, _SOURCE)
    kind = value["kind"].text()
    fields = {name: field for name, field in content.items() if name != "kind"}
    rest = JsonValue(fields, _SOURCE)
    if kind == "status":
        rest.require_names(("record", "call"))
        call = rest["call"].row(CollectiveCall)
        try:
            return Status(RankRecord.of(rest["record"].content), call)
        except ConfigError as error:
            return Status(error, call)
    if kind == "goodbye":
        return rest.record(Goodbye)
    failure = rest.record(Failure)
    if kind != "failure" or failure.what not in KINDS:
        raise value.refused("a failure of a known kind")
    return failure


class Peer:
    """Another rank of the job, as the watch knows it.

    Attributes:
        rank: The rank.
        sock: The connection to it.
        record: Its last record, without steps.
        call: The last collective call that it has begun.
        rows: Steps of its records that nobody has read yet.
        heard: Time of its last message (``time.monotonic()``).
        left: Whether it said goodbye or reported a failure, so that no more messages come from it.
        ended: Whether the connection has ended.
        unsent: Bytes for it that the kernel has not taken yet.
    """

    def __init__(self, rank: int, sock: socket.socket, seals: Seals | None) -> None:
        """Takes over a connected socket and makes it non-blocking."""
        sock.setblocking(False)
        self.rank = rank
        self.sock = sock
        self.record = RankRecord(rank, "nothing heard yet")
        self.call = CollectiveCall()
        self.rows: deque[StepRow] = deque(maxlen=4 * MOST_ROWS)
        self.heard = time.monotonic()
        self.left = False
        self.ended = False
        self.unsent = bytearray()
        self._outgoing = None if seals is None else seals.outgoing
        self._incoming = None if seals is None else seals.incoming
        self._received = bytearray()
        self._refused = False

    def queue_message(self, message: dict[str, Any]) -> None:
        """Sends a message without waiting for a rank that does not read.

        Bytes that the kernel does not take wait for :meth:`send`. A record is dropped if earlier
        bytes still wait or the rank is silent.
        """
        if message["kind"] != "status" or not (self.silent or self.unsent):
            self.unsent += pack(message, self._outgoing)
            self.send()

    def send(self) -> None:
        """Sends as many waiting bytes as the kernel takes."""
        with contextlib.suppress(OSError):
            sent = self.sock.send(self.unsent, systems.MSG_NOSIGNAL)
            del self.unsent[:sent]

    def read_failures(self) -> Iterator[Failure]:
        """Reads the messages that have arrived, and yields the failures that they report.

        Raises:
            TransportError: A message does not have the rank's seal.
            ValueError: The bytes are not a message.
        """
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = not data
        self._received += data
        for message in unpack(self._received, self._incoming):
            self.heard = time.monotonic()
            if isinstance(message, Status):
                self._store_record(message.record)
                self.call = message.call
                continue
            # A rank that reports a failure leaves because of it: the end of its connection is then
            # no failure of its own.
            self.left = True
            if isinstance(message, Failure):
                yield message

    def _store_record(self, record: RankRecord | ConfigError) -> None:
        """Stores a record; an invalid one is left out, and the first of these is logged."""
        if isinstance(record, RankRecord) and record.rank == self.rank:
            self.record = record.lean
            self.rows.extend(record.rows)
        elif not self._refused:
            self._refused = True
            why = f"it is one of rank {record.rank}" if isinstance(record, RankRecord) else record
            _log.warning("a record of rank %d was left out, and so are others: %s", self.rank, why)

    @property
    def silence(self) -> float:
        """Seconds since the rank's last message."""
        return time.monotonic() - self.heard

    @property
    def silent(self) -> bool:
        """Whether the rank's next record is overdue."""
        return self.silence > SILENT_SECONDS

    def whereabouts(self) -> str:
        """Returns in words what the rank was doing at its last message."""
        if self.silent:
            return (
                f"rank {self.rank} is silent for {self.silence:.1f} s: stopped, or its host or "
                f"network is gone; it was at: {self.record.action}"
            )
        return f"rank {self.rank} is at: {self.record.action}"

    def end(self) -> None:
        """Closes the sending half of the connection; earlier messages are still delivered."""
        # Bytes left unread would make TCP discard what is still on its way to the peer.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(1 << 16):
                pass
