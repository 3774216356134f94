"""What follows each part of a stream where the job has a secret: who sent it, and as which one.

A seal is a keyed BLAKE2b of the part's number in its direction and of the part. Each direction of
each connection has a key of its own, so that no part passes in another place than its own.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable
from typing import NamedTuple

from fleetpipe.errors import TransportError

SEAL_BYTES = 16

_COUNT = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview


class Seal:
    """One direction of a connection."""

    def __init__(self, key: bytes) -> None:
        """Begins at the first part. ``key``: at most 64 bytes."""
        self._key = key
        self._count = 0

    def of(self, pieces: Iterable[Buffer]) -> bytes:
        """Returns the seal of the next part, whose bytes are those of ``pieces`` in order."""
        made = hashlib.blake2b(_COUNT.pack(self._count), key=self._key, digest_size=SEAL_BYTES)
        self._count += 1
        for piece in pieces:
            made.update(piece)
        return made.digest()

    def check(self, pieces: Iterable[Buffer], seal: Buffer) -> None:
        """Makes sure that ``seal`` is that of the next part.

        Raises:
            TransportError: The part is not the next one that the other end sent, to the bit.
        """
        if not hmac.compare_digest(self.of(pieces), bytes(seal)):
            raise TransportError(
                "a part of the stream does not have the seal of the rank at its other end",
                cause="it was changed, repeated, left out or made up on the way",
            )


class Seals(NamedTuple):
    """Both directions of a connection, as one of its ends sees them."""

    outgoing: Seal
    incoming: Seal
