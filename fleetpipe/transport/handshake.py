"""The handshake by which the two ends of a new connection prove that they belong to one run.

The run's secret is derived from a token that rank 0 puts into the store, and from the user's
secret, if there is one, which never enters the store.

The end that connects sends its rank, the end that accepts sends a challenge, and each proves in
turn that it knows the run's secret, without sending it:

    connects -> accepts   greeting: magic, version, own rank, peer's rank, ranks, stream,
                          life, 32 random bytes
    accepts  -> connects  32 random bytes
    connects -> accepts   HMAC-SHA256(secret, "connects" + all bytes so far)
    accepts  -> connects  HMAC-SHA256(secret, "accepts" + all bytes so far but the proof)

If the user gave a secret, both then derive the keys of the seals of all later messages: by HMAC
over the same bytes, which hold 32 random ones of each side.

Both sides are written as generators that yield bytes to send or a number of bytes to receive, so
that one thread runs many of them at once and no stranger holds up another peer. The stream number
distinguishes the connections that two ranks open at once. The number of the attempt ("life" above)
distinguishes the processes of a job from those of an earlier start of it.

Before that, each rank publishes a card, a JSON object of texts about itself, in the job's store and
reads the other ranks' cards. A store's ``get`` of a missing key may block for ever, so each card
has a counter that is polled until the deadline, and only existing cards are read.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import struct
from collections.abc import Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fleetpipe.errors import ConfigError, PipelineTimeout, TransportError
from fleetpipe.json_value import parse_small
from fleetpipe.transport.base import Limit, Store, await_keys
from fleetpipe.transport.wire.structure import VERSION, Seal, Seals

TOKEN_BYTES = 32
SHORTEST_SECRET = 16

_GREETING = struct.Struct("<8sIIIIII32s")
_MAGIC = b"FLEETPIP"
_NONCE_BYTES = 32
_PROOF_BYTES = 32

_LARGEST_CARD = 1 << 16


class Greeting(NamedTuple):
    """The identity of the other end of a connection, which it has proved.

    Attributes:
        peer: Its rank.
        stream: Number of this connection among those between the two ranks.
        seals: The seals of the connection.
    """

    peer: int
    stream: int
    seals: Seals


Exchange = Generator[bytes | int, bytes, Greeting]


class Stranger(Exception):
    """The other end does not belong to this run."""


class Stale(Stranger):
    """The other end says that it belongs to another attempt of the job."""


def user_secret() -> bytes:
    """Returns ``FLEETPIPE_SECRET``, or the text in the file ``FLEETPIPE_SECRET_FILE``; else b"".

    Raises:
        ConfigError: The file cannot be read, or the secret is too short.
    """
    name = "FLEETPIPE_SECRET"
    secret = os.environ.get(name)
    if secret is None:
        name = "FLEETPIPE_SECRET_FILE"
        path = os.environ.get(name)
        if path is None:
            return b""
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {name}={path}",
                got=str(error),
                fix=f"make it a text file that this process may read, or unset {name}",
            ) from None
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the secret in {name} is too short",
            expected=f"at least {SHORTEST_SECRET} characters, the same for all ranks",
            got=f"{len(secret)} characters",
            fix="python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return secret.encode()


def fingerprint(secret: bytes, namespace: str) -> str:
    """Returns a text that two ranks share only if they have the same secret; "" without one."""
    return (
        hmac.digest(secret, f"fingerprint {namespace}".encode(), "sha256").hex() if secret else ""
    )


def secret_of_run(secret: bytes, namespace: str, token: str) -> bytes:
    """Returns the secret of the ranks that meet in ``namespace`` this time."""
    return hmac.digest(secret, f"run {namespace} {token}".encode(), "sha256")


def connects(
    secret: bytes, rank: int, peer: int, ranks: int, stream: int = 0, attempt: int = 0
) -> Exchange:
    """The handshake of rank ``rank``, in an attempt of the job, after connecting to rank ``peer``.

    Returns:
        The proved identity of the other end.

    Raises:
        Stranger: The other end does not know the secret.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    greeting = _GREETING.pack(_MAGIC, VERSION, rank, peer, ranks, stream, attempt, nonce)
    yield greeting
    said = greeting + (yield _NONCE_BYTES)
    yield _proof(secret, b"connects", said)
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(secret, b"accepts", said)):
        raise Stranger(f"rank {peer} did not prove that it belongs to this run")
    seals = Seals(_seal(secret, b"connects", said), _seal(secret, b"accepts", said))
    return Greeting(peer, stream, seals)


def accepts(secret: bytes, rank: int, ranks: int, streams: int = 1, attempt: int = 0) -> Exchange:
    """The handshake of rank ``rank``, in an attempt of the job, after it accepted a connection.

    Returns:
        The proved identity of the other end.

    Raises:
        Stale: The other end belongs to another attempt of the job.
        Stranger: The other end is no peer, or does not know the secret.
    """
    greeting = yield _GREETING.size
    magic, version, peer, target, their_ranks, stream, their_life, _ = _GREETING.unpack(greeting)
    if (magic, version, target, their_ranks) != (_MAGIC, VERSION, rank, ranks):
        raise Stranger("its greeting is not that of a peer")
    if not rank < peer < ranks:
        raise Stranger(f"rank {peer} has no reason to connect to rank {rank}")
    if stream >= streams:
        raise Stranger(f"rank {peer} asks for stream {stream} of {streams}")
    if their_life != attempt:
        raise Stale(
            f"a rank {peer} of attempt {their_life} of the job, which is in attempt {attempt}"
        )
    challenge = secrets.token_bytes(_NONCE_BYTES)
    yield challenge
    said = greeting + challenge
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(secret, b"connects", said)):
        raise Stranger(f"it claims to be rank {peer} but does not know the secret")
    yield _proof(secret, b"accepts", said)
    seals = Seals(_seal(secret, b"accepts", said), _seal(secret, b"connects", said))
    return Greeting(peer, stream, seals)


def _proof(secret: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, side + said, "sha256")


def _seal(secret: bytes, side: bytes, said: bytes) -> Seal:
    return Seal(hmac.digest(secret, side + b" seals " + said, "sha256"))


class Rendezvous:
    """The place in the store where the ranks of a pipeline meet, as one rank uses it."""

    def __init__(self, store: Store, namespace: str, rank: int, ranks: int, timeout: float) -> None:
        """Enters ``namespace`` as ``rank``.

        Args:
            store: The job's store.
            namespace: Prefix of all keys, new in this store.
            rank: This rank.
            ranks: Ranks that meet.
            timeout: Seconds from now that everything here may take in sum.

        Raises:
            TransportError: This rank has entered the namespace before.
        """
        self.rank = rank
        self.ranks = ranks
        self.timeout = timeout
        self.limit = Limit(timeout)
        self._store = store
        self._namespace = namespace
        if store.add(f"{namespace}/{rank}/entered", 1) != 1:
            raise TransportError(
                f"rank {rank} entered the namespace {namespace!r} twice",
                cause="two processes have one rank, or a namespace of an earlier connection "
                "is used again",
                fix="give each process its own rank and each connection its own namespace",
            )

    def publish(self, subject: str, card: Mapping[str, str]) -> None:
        """Writes this rank's ``card`` about ``subject`` for the others to read."""
        key = f"{self._namespace}/{self.rank}/{subject}"
        text = {"version": VERSION, "ranks": self.ranks, **card}
        self._store.set(key, json.dumps(text))
        self._store.add(f"{key}/ready", 1)

    def gather(
        self, subject: str, ranks: Iterable[int], names: Collection[str]
    ) -> dict[int, dict[str, str]]:
        """Waits for the cards of ``ranks`` about ``subject`` and returns them.

        Raises:
            PipelineTimeout: Some are not there at the limit; the message says whose.
            TransportError: A card is damaged, from another version or for another number of ranks.
        """
        keys = {rank: f"{self._namespace}/{rank}/{subject}" for rank in ranks}
        counters = {rank: f"{key}/ready" for rank, key in keys.items()}
        arriving = await_keys(
            self._store, counters, self.limit, lambda missing, _: self.late(missing)
        )
        return {rank: self._read(rank, keys[rank], names) for rank in arriving}

    def late(self, missing: Iterable[int]) -> PipelineTimeout:
        """Returns the error that names the ranks that did not arrive."""
        names = ", ".join(str(rank) for rank in sorted(missing))
        return PipelineTimeout(
            f"rank {self.rank} waited {self.timeout:g} s for rank(s) {names} to connect",
            where=f"connecting the {self.ranks} ranks of {self._namespace!r}",
            expected=f"all ranks from 0 to {self.ranks - 1} to call connect()",
            cause=f"rank(s) {names} failed before, are still starting, or cannot be reached",
            fix=f"read the log of rank(s) {names}; raise the timeout if they only start slowly",
        )

    def _read(self, rank: int, key: str, names: Collection[str]) -> dict[str, str]:
        text = self._store.get(key)
        try:
            card = parse_small(text[:_LARGEST_CARD], 1, 1, 16)
            fits = (card.pop("version"), card.pop("ranks"))
            if not all(type(card[name]) is str for name in names):
                raise ValueError("not all of it is text")
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise TransportError(
                f"what the store holds as the card of rank {rank} is none",
                expected=f"a JSON object with the texts {', '.join(names)}",
                got=f"{text[:200]!r} ({str(error)[:200]})",
                cause="another program wrote into the job's store",
                fix="launch again; with another --master HOST:PORT if that happens twice",
            ) from None
        if fits != (VERSION, self.ranks):
            raise TransportError(
                f"rank {rank} and rank {self.rank} do not fit together",
                expected=f"version {VERSION} of the transport and {self.ranks} ranks",
                got=f"version {fits[0]} and {fits[1]} ranks",
                fix="start all ranks with the same fleetpipe and the same pp_degree",
            )
        return dict(card)
