"""The key of a message, its description in words, and the header of its frame."""

from __future__ import annotations

import functools
import struct
import time
import zlib
from typing import NamedTuple

from fleetpipe.errors import TransportError

MAGIC = b"FLTP"
VERSION = 5
KINDS = b"FBCHL"
#: The kinds that no edge of stages has.
CONTROL = ("C", "H", "L")
MESSAGE, GOODBYE = 1, 2
LARGEST_NUMBER = 2**32 - 1
LARGEST_ANNOUNCEMENT = 1 << 24
LARGEST_PAYLOAD = 1 << 36

_FIELDS = struct.Struct("<4sBBBxIIIIIIQ")
_CHECKSUM = struct.Struct("<I")
_WHOLE = struct.Struct(_FIELDS.format + "I")
# The call, and the moment.
_LAST = struct.Struct("<IQ")
HEADER_BYTES = _WHOLE.size + _LAST.size
# Every step has the headers of the one before. To make or check one takes 7 us between a backward
# and a forward, where neither code nor data are in the caches; to look it up takes 1 us.
_KNOWN_HEADERS = 4096


class MessageKey(NamedTuple):
    """Names a message between two ranks; several messages with one key are first-in first-out.

    Attributes:
        kind: "F" for the value of an edge, "B" for its gradient, "C" for control, "H" for control
            with tensors that stay in the host's memory, "L" for control that another rank may take
            in a later collective call.
        source: The stage that produces the value of the edge; 0 for control.
        target: The stage that consumes the value of the edge; 0 for control.
        name: The edge's name, or the purpose of a control message.
        micro_batch: The micro-batch, 0 to 2**32 - 1.
    """

    kind: str
    source: int
    target: int
    name: str
    micro_batch: int


def describe(key: MessageKey) -> str:
    """Returns the key in words.

    >>> describe(MessageKey("F", 0, 1, "", 3))
    'F of edge 0>1, micro-batch 3'
    """
    if key.kind in CONTROL:
        return f"control message {key.name!r} number {key.micro_batch}"
    name = f":{key.name}" if key.name else ""
    return f"{key.kind} of edge {key.source}>{key.target}{name}, micro-batch {key.micro_batch}"


class Route(NamedTuple):
    """A message between two ranks; ``str()`` describes it in words."""

    key: MessageKey
    source: int
    target: int

    def __str__(self) -> str:
        return f"{describe(self.key)} from rank {self.source} to rank {self.target}"


def check_key(key: MessageKey) -> None:
    """Refuses a key that a frame cannot carry.

    Raises:
        TransportError: The kind is unknown or a number is out of range.
    """
    numbers = (key.source, key.target, key.micro_batch)
    if (
        key.kind not in ("F", "B", *CONTROL)
        or not isinstance(key.name, str)
        or not all(isinstance(n, int) and 0 <= n <= LARGEST_NUMBER for n in numbers)
    ):
        raise TransportError(
            "a message cannot have this key",
            expected="kind F, B, C or H, a name that is a str, and numbers from 0 to 2**32 - 1",
            got=repr(tuple(key)),
            fix="send it with a MessageKey of this form",
        )


def check_peer(rank: int, ranks: int, peer: int, key: MessageKey) -> None:
    """Refuses a message to or from a rank that is not another rank of the pipeline.

    Raises:
        TransportError: ``peer`` is this rank itself or not in 0..ranks-1.
    """
    if peer == rank or not 0 <= peer < ranks:
        raise TransportError(
            f"rank {rank} has no connection to rank {peer}",
            where=describe(key),
            expected=f"another rank of 0 to {ranks - 1}",
            got=str(peer),
            fix="name another rank of this connection",
        )


class Header(NamedTuple):
    """The fixed first bytes of a frame.

    Attributes:
        frame: ``MESSAGE`` or ``GOODBYE``.
        kind: The key's kind, as the number of its letter.
        source: The key's source stage.
        target: The key's target stage.
        channel: The sender's number for (kind, source, target, name) on this connection.
        structure: How many times this channel has announced a structure.
        micro_batch: The key's micro-batch.
        announcement: Bytes of announcement that follow the header, most often 0.
        payload: Bytes of tensor data that follow the announcement.
    """

    frame: int
    kind: int
    source: int
    target: int
    channel: int
    structure: int
    micro_batch: int
    announcement: int
    payload: int


def pack_header(header: Header | tuple[int, ...], call: int = 0) -> bytes:
    """Returns the ``HEADER_BYTES`` bytes of a header, with a checksum and the current time.

    Args:
        header: The header.
        call: The kind of the collective call in which it is sent, as a number; 0 for none.
    """
    return _pack(header) + _LAST.pack(call, time.monotonic_ns())


def unpack_header(data: bytes) -> tuple[Header, int, int]:
    """Reads a header.

    Returns:
        The header, its sender's call, and when it was packed, in nanoseconds of its clock.

    Raises:
        TransportError: The bytes are no header of this version, or are damaged.
    """
    return (_unpack(data[: _WHOLE.size]), *_LAST.unpack_from(data, _WHOLE.size))


@functools.lru_cache(_KNOWN_HEADERS)
def _pack(header: Header | tuple[int, ...]) -> bytes:
    fields = _FIELDS.pack(MAGIC, VERSION, *header)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


@functools.lru_cache(_KNOWN_HEADERS)
def _unpack(data: bytes) -> Header:
    magic, version, *fields, checksum = _WHOLE.unpack(data)
    if magic != MAGIC or checksum != zlib.crc32(data[: _FIELDS.size]):
        raise TransportError(
            "a frame begins with a damaged header",
            expected=f"{_WHOLE.size} bytes that begin with {MAGIC!r} and end with their checksum",
            got=data.hex(),
        )
    header = Header._make(fields)
    if version != VERSION or header.frame not in (MESSAGE, GOODBYE) or header.kind not in KINDS:
        raise TransportError(
            "a frame has a header of another version",
            expected=f"version {VERSION}, frame {MESSAGE} or {GOODBYE}, kind F, B, C or H",
            got=f"version {version}, frame {header.frame}, kind {chr(header.kind)!r}",
            fix="install the same version of fleetpipe on every host",
        )
    if header.announcement > LARGEST_ANNOUNCEMENT or header.payload > LARGEST_PAYLOAD:
        raise TransportError(
            "a frame claims an absurd length",
            expected=f"at most {LARGEST_ANNOUNCEMENT} bytes of announcement and "
            f"{LARGEST_PAYLOAD} bytes of payload",
            got=f"{header.announcement} and {header.payload}",
        )
    return header
