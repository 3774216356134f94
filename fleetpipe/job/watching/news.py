"""What ranks of a job tell each other through the watch: a length, a JSON object, and its seal.

Nothing of it is believed before it is checked: a message of another shape is a ``ValueError``. A
record that is none comes as the error that says so: the job can do without it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from fleetpipe.errors import ConfigError
from fleetpipe.job.watching.failure import KINDS
from fleetpipe.transport.wire.parsing import parse
from fleetpipe.transport.wire.seal import SEAL_BYTES, Seal
from fleetpipe.watch.records import MOST_ROWS, RankRecord

_LENGTH = struct.Struct("<I")
_LARGEST = 1 << 20
#: Lists and objects of a message within each other, and in all: those of a record with its rows.
_DEEPEST, _MOST_PARTS = 5, 4 + 3 * MOST_ROWS
_MOST_STRINGS = 32
_FIELDS: dict[str, dict[str, type]] = {
    "status": {"record": dict},
    "goodbye": {},
    "failure": {"rank": int, "what": str, "text": str, "details": str, "permanent": bool},
}


def pack(message: dict[str, Any], seal: Seal | None) -> bytes:
    """Returns the bytes of a message."""
    text = json.dumps(message).encode()
    frame = _LENGTH.pack(len(text)) + text
    return frame if seal is None else frame + seal.of([frame])


def unpack(received: bytearray, seal: Seal | None) -> Iterator[dict[str, Any]]:
    """Takes from ``received`` the messages that have arrived whole.

    Raises:
        TransportError: A message does not have the seal of who should have sent it.
        ValueError: The bytes are no message.
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
        yield _checked(parse(frame[_LENGTH.size :], _DEEPEST, _MOST_PARTS, _MOST_STRINGS))


def _checked(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError("no object")
    kind = message.get("kind")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or message.keys() != {"kind", *fields}:
        raise ValueError(f"an object with the fields {sorted(message)}"[:200])
    if any(type(message[name]) is not type_ for name, type_ in fields.items()):
        raise ValueError(f"fields of other types than {fields}")
    if kind == "failure" and message["what"] not in KINDS:
        raise ValueError(f"a failure of another kind: {message['what'][:40]!r}")
    if kind == "status":
        try:
            return {"kind": kind, "record": RankRecord.of(message["record"])}
        except ConfigError as error:
            return {"kind": kind, "record": error}
    return message
