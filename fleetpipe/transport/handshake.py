"""How the two ends of a new connection prove to each other that they belong to one run.

The end that connects says who it is, the end that accepts sends a challenge, and each shows in
turn that it knows the run's secret, without telling it:

    connects -> accepts   greeting: magic, version, own rank, peer's rank, ranks, 32 random bytes
    accepts  -> connects  32 random bytes
    connects -> accepts   HMAC-SHA256(secret, "connects" + all bytes so far)
    accepts  -> connects  HMAC-SHA256(secret, "accepts" + all bytes so far but the proof)

Both sides are written as generators that yield bytes to send or a number of bytes to receive, so
that one thread runs many of them at once and no stranger holds up another peer.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Generator
from typing import Union

from .message import VERSION

SECRET_BYTES = 32

_GREETING = struct.Struct("<8sIIII32s")
_MAGIC = b"FLEETPIP"
_NONCE_BYTES = 32
_PROOF_BYTES = 32

Exchange = Generator[Union[bytes, int], bytes, int]


class Stranger(Exception):
    """The other end does not belong to this run."""


def connects(secret: bytes, rank: int, peer: int, ranks: int) -> Exchange:
    """The side of rank ``rank``, which has connected to rank ``peer``. Returns ``peer``.

    Raises:
        Stranger: The other end does not know the secret.
    """
    greeting = _GREETING.pack(_MAGIC, VERSION, rank, peer, ranks, secrets.token_bytes(_NONCE_BYTES))
    yield greeting
    said = greeting + (yield _NONCE_BYTES)
    yield _proof(secret, b"connects", said)
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(secret, b"accepts", said)):
        raise Stranger(f"rank {peer} did not prove that it belongs to this run")
    return peer


def accepts(secret: bytes, rank: int, ranks: int) -> Exchange:
    """The side of rank ``rank``, which has accepted somebody. Returns the rank of the other end.

    Raises:
        Stranger: The other end is no peer, or does not know the secret.
    """
    greeting = yield _GREETING.size
    magic, version, peer, target, their_ranks, _ = _GREETING.unpack(greeting)
    if (magic, version, target, their_ranks) != (_MAGIC, VERSION, rank, ranks):
        raise Stranger("its greeting is not that of a peer")
    if not rank < peer < ranks:
        raise Stranger(f"rank {peer} has no reason to connect to rank {rank}")
    challenge = secrets.token_bytes(_NONCE_BYTES)
    yield challenge
    said = greeting + challenge
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(secret, b"connects", said)):
        raise Stranger(f"it claims to be rank {peer} but does not know the secret")
    yield _proof(secret, b"accepts", said)
    return int(peer)


def _proof(secret: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, side + said, "sha256")
