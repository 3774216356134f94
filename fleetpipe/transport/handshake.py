"""The handshake by which the two ends of a new connection prove that they belong to one run.

The run's secret is derived from a token that rank 0 puts into the store, and from the user's
secret, if there is one, which never enters the store.

The end that connects sends its rank, the end that accepts sends a challenge, and each proves in
turn that it knows the run's secret, without sending it:

    connects -> accepts   greeting: magic, version, its rank, the peer's rank, ranks, stream,
                          attempt, 32 random bytes
    accepts  -> connects  32 random bytes
    connects -> accepts   HMAC-SHA256(secret, "connects" + all bytes so far)
    accepts  -> connects  HMAC-SHA256(secret, "accepts" + all bytes so far but the proof)

If the user gave a secret, both ends then derive the keys by which all later messages are sealed
(authenticated): by HMAC over the same bytes, which hold 32 random ones of each end.

Both sides are generators that yield bytes to send or a number of bytes to receive, so that one
thread runs many handshakes at once and no stranger holds up another peer. The stream number
distinguishes the connections that two ranks open at once. The number of the attempt, of one start
of the job, distinguishes its processes from those of an earlier start.

Before that, each rank publishes its facts, a JSON object of texts such as its address, in the job's
store and reads the other ranks' facts. A store's ``get`` of a missing key may block for ever, so
each rank also has a counter that is polled until the deadline; only facts that are there are read.
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

#: Random bytes of the token that rank 0 puts into the store.
TOKEN_BYTES = 32
#: The fewest characters of a user's secret.
SHORTEST_SECRET = 16

_GREETING = struct.Struct("<8sIIIIII32s")
_MAGIC = b"FLEETPIP"
_NONCE_BYTES = 32
_PROOF_BYTES = 32

#: The most bytes of one rank's facts that are read.
_LARGEST_FACTS = 1 << 16


class Greeting(NamedTuple):
    """The result of a handshake: which rank the other end of a connection has proved to be.

    Attributes:
        peer: The rank at the other end.
        stream: Number of this connection among those between the two ranks.
        seals: The seals of the connection's two directions.
    """

    peer: int
    stream: int
    seals: Seals


#: One side of a handshake: yields bytes to send, or the number of bytes that it is to be sent.
Exchange = Generator[bytes | int, bytes, Greeting]


class Stranger(Exception):
    """Says that the other end of a connection does not belong to this run."""


class Stale(Stranger):
    """Says that the other end of a connection belongs to another attempt of the job."""


def user_secret() -> bytes:
    """Returns the user's secret from the environment; b"" if there is none.

    It is the value of ``FLEETPIPE_SECRET``, else the text in the file ``FLEETPIPE_SECRET_FILE``.

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
    """Returns a text that is equal on two ranks only if their secrets are; "" without a secret."""
    return (
        hmac.digest(secret, f"fingerprint {namespace}".encode(), "sha256").hex() if secret else ""
    )


def secret_of_run(secret: bytes, namespace: str, token: str) -> bytes:
    """Derives the secret that the ranks of one run use in handshakes.

    Args:
        secret: The user's secret, or b"".
        namespace: The prefix of the keys at which the ranks meet in the store.
        token: The random text of rank 0, new in each run.
    """
    return hmac.digest(secret, f"run {namespace} {token}".encode(), "sha256")


def connecting_side(
    secret: bytes, rank: int, peer: int, ranks: int, stream: int = 0, attempt: int = 0
) -> Exchange:
    """Runs the handshake at the end that connected: yields bytes to send, or how many to get.

    Args:
        secret: The run's secret.
        rank: This rank.
        peer: The lower rank to which this end has connected.
        ranks: Number of ranks that join.
        stream: Number of this connection among those between the two ranks.
        attempt: The attempt of the job to which this process belongs.

    Returns:
        The proved identity of the other end.

    Raises:
        Stranger: The other end does not know the secret.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    greeting = _GREETING.pack(_MAGIC, VERSION, rank, peer, ranks, stream, attempt, nonce)
    yield greeting
    transcript = greeting + (yield _NONCE_BYTES)
    yield _make_proof(secret, b"connects", transcript)
    if not hmac.compare_digest((yield _PROOF_BYTES), _make_proof(secret, b"accepts", transcript)):
        raise Stranger(f"rank {peer} did not prove that it belongs to this run")
    return Greeting(peer, stream, _make_seals(secret, b"connects", b"accepts", transcript))


def accepting_side(
    secret: bytes, rank: int, ranks: int, streams: int = 1, attempt: int = 0
) -> Exchange:
    """Runs the handshake at the end that accepted: yields bytes to send, or how many to get.

    Args:
        secret: The run's secret.
        rank: This rank.
        ranks: Number of ranks that join.
        streams: Number of connections between each two ranks.
        attempt: The attempt of the job to which this process belongs.

    Returns:
        The proved identity of the other end.

    Raises:
        Stale: The other end belongs to another attempt of the job.
        Stranger: The other end is not a higher rank of this run, or does not know the secret.
    """
    greeting = yield _GREETING.size
    magic, version, peer, target, peer_ranks, stream, peer_attempt, _ = _GREETING.unpack(greeting)
    if (magic, version, target, peer_ranks) != (_MAGIC, VERSION, rank, ranks):
        raise Stranger("its greeting is not that of a peer")
    if not rank < peer < ranks:
        raise Stranger(f"rank {peer} has no reason to connect to rank {rank}")
    if stream >= streams:
        raise Stranger(f"rank {peer} asks for stream {stream} of {streams}")
    if peer_attempt != attempt:
        raise Stale(
            f"a rank {peer} of attempt {peer_attempt} of the job, which is in attempt {attempt}"
        )
    challenge = secrets.token_bytes(_NONCE_BYTES)
    yield challenge
    transcript = greeting + challenge
    if not hmac.compare_digest((yield _PROOF_BYTES), _make_proof(secret, b"connects", transcript)):
        raise Stranger(f"it claims to be rank {peer} but does not know the secret")
    yield _make_proof(secret, b"accepts", transcript)
    return Greeting(peer, stream, _make_seals(secret, b"accepts", b"connects", transcript))


def _make_proof(secret: bytes, side: bytes, transcript: bytes) -> bytes:
    """Returns the proof that ``side`` ("connects" or "accepts") knows the run's secret."""
    return hmac.digest(secret, side + transcript, "sha256")


def _make_seals(secret: bytes, side: bytes, other: bytes, transcript: bytes) -> Seals:
    """Returns the seals of ``side``: of what it sends, and of what the other side sends."""
    keys = [hmac.digest(secret, end + b" seals " + transcript, "sha256") for end in (side, other)]
    return Seals(Seal(keys[0]), Seal(keys[1]))


class Rendezvous:
    """Exchanges facts among the ranks that meet under one prefix of the store's keys."""

    def __init__(self, store: Store, namespace: str, rank: int, ranks: int, timeout: float) -> None:
        """Enters ``namespace`` as ``rank``.

        Args:
            store: The job's store.
            namespace: Prefix of all keys, new in this store.
            rank: This rank.
            ranks: Ranks that meet.
            timeout: Seconds from now within which all calls together must end.

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

    def publish(self, subject: str, facts: Mapping[str, str]) -> None:
        """Writes this rank's ``facts`` about ``subject`` into the store, for the other ranks."""
        key = f"{self._namespace}/{self.rank}/{subject}"
        text = {"version": VERSION, "ranks": self.ranks, **facts}
        self._store.set(key, json.dumps(text))
        self._store.add(f"{key}/ready", 1)

    def gather(
        self, subject: str, ranks: Iterable[int], names: Collection[str]
    ) -> dict[int, dict[str, str]]:
        """Waits until ranks have published their facts about a subject; returns the facts by rank.

        Args:
            subject: The subject of :meth:`publish`.
            ranks: The ranks to wait for.
            names: The names that each rank's facts must have.

        Raises:
            PipelineTimeout: Some ranks have not published within the limit; the message names them.
            TransportError: Facts are damaged, from another version or for another number of ranks.
        """
        keys = {rank: f"{self._namespace}/{rank}/{subject}" for rank in ranks}
        counters = {rank: f"{key}/ready" for rank, key in keys.items()}
        arriving = await_keys(
            self._store, counters, self.limit, lambda missing, _: self.timeout_error(missing)
        )
        return {rank: self._read_facts(rank, keys[rank], names) for rank in arriving}

    def timeout_error(self, missing: Iterable[int]) -> PipelineTimeout:
        """Returns the error that names the ranks that did not arrive within the limit."""
        names = ", ".join(str(rank) for rank in sorted(missing))
        return PipelineTimeout(
            f"rank {self.rank} waited {self.timeout:g} s for rank(s) {names} to connect",
            where=f"connecting the {self.ranks} ranks of {self._namespace!r}",
            expected=f"all ranks from 0 to {self.ranks - 1} to call connect()",
            cause=f"rank(s) {names} failed before, are still starting, or cannot be reached",
            fix=f"read the log of rank(s) {names}; raise the timeout if they only start slowly",
        )

    def _read_facts(self, rank: int, key: str, names: Collection[str]) -> dict[str, str]:
        """Returns the facts that ``rank`` has stored under ``key``; checks their names."""
        text = self._store.get(key)
        try:
            facts = parse_small(text[:_LARGEST_FACTS], 1, 1, 16)
            version, ranks = facts.pop("version"), facts.pop("ranks")
            if not all(type(facts[name]) is str for name in names):
                raise ValueError("not all of it is text")
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise TransportError(
                f"what the store has as the facts of rank {rank} is not valid",
                expected=f"a JSON object with the texts {', '.join(names)}",
                got=f"{text[:200]!r} ({str(error)[:200]})",
                cause="another program wrote into the job's store",
                fix="launch again; with another --master HOST:PORT if that happens twice",
            ) from None
        if (version, ranks) != (VERSION, self.ranks):
            raise TransportError(
                f"rank {rank} and rank {self.rank} do not fit together",
                expected=f"version {VERSION} of the transport and {self.ranks} ranks",
                got=f"version {version} and {ranks} ranks",
                fix="start all ranks with the same fleetpipe and the same pp_degree",
            )
        return dict(facts)
