"""Seals: proofs of who sent each part of a stream, and in which place, if the job has a secret.

A seal is a keyed BLAKE2b of the part's number in its direction and of the part. Each direction of
each connection has a key of its own, so that a part is valid in its own place only.
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
    """The seals of one direction of a connection."""

    def __init__(self, key: bytes) -> None:
        """Starts at the first part. ``key``: at most 64 bytes."""
        self._key = key
        self._count = 0

    def of(self, pieces: Iterable[Buffer]) -> bytes:
        """Returns the seal of the next part, which consists of ``pieces`` in order."""
        made = hashlib.blake2b(_COUNT.pack(self._count), key=self._key, digest_size=SEAL_BYTES)
        self._count += 1
        for piece in pieces:
            made.update(piece)
        return made.digest()

    def check(self, pieces: Iterable[Buffer], seal: Buffer) -> None:
        """Raises an error unless ``seal`` is the seal of the next part.

        Raises:
            TransportError: The part is not, bit for bit, the next one that the other end sent.
        """
        if not hmac.compare_digest(self.of(pieces), bytes(seal)):
            raise TransportError(
                "a part of the stream does not have the seal of the rank at its other end",
                cause="it was changed, repeated, left out or made up on the way",
            )


class Seals(NamedTuple):
    """The seals of both directions of a connection, from the view of one end."""

    outgoing: Seal
    incoming: Seal
