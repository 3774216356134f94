"""Connects each rank to every other, turns away strangers, and ends connections with the process.

A rank connects to all lower ranks and accepts all higher ones, in one loop on one thread. Two ranks
may open several streams, connections for uses that must not wait for each other. A rank then has
``streams * (ranks - 1)`` sockets, which is the first limit of a large job: with 2 streams a limit
of 1024 open files (``ulimit -n``) is enough for about 500 ranks. A forked child's copy, as in a
data loader's worker, would keep a connection open after its parent's death, unnoticed by the peers.
"""

from __future__ import annotations

import atexit
import os
import secrets
import selectors
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fleetpipe import log, systems
from fleetpipe.errors import TransportError
from fleetpipe.transport import handshake, hosts
from fleetpipe.transport.base import Store
from fleetpipe.transport.handshake import Rendezvous
from fleetpipe.transport.wire.structure import Seals

#: The objects of this process that have open connections, to close in a forked child.
open_holders: weakref.WeakSet[ConnectionHolder] = weakref.WeakSet()

#: The transports to close when the process ends, unless its job was ended before.
closed_at_exit: weakref.WeakSet[ClosedAtExit] = weakref.WeakSet()

_log = log.logger(__name__)

#: Seconds for all ranks to arrive, if the caller says nothing.
DEFAULT_TIMEOUT = 600.0
#: Seconds in which an accepted connection must prove to be a peer's; a peer that is dropped tries
#: again.
STRANGER_SECONDS = 5.0
#: Accepted connections that may be unproved at a time; if there are more, the oldest is dropped.
MOST_STRANGERS = 64
#: Seconds after which a connection that failed is tried again.
_RETRY_SECONDS = 0.1


class ConnectionHolder(Protocol):
    """An object with open connections, such as a transport or a watch."""

    def abandon(self) -> None:
        """Closes this process's copies of the sockets after a fork; the parent's stay open."""


class ClosedAtExit(Protocol):
    """An object that tells its peers when it is closed, such as a transport."""

    def close(self, reason: str = "") -> None:
        """Ends the connections; with a reason, the peers learn of a failure."""


def _abandon_all() -> None:
    """Closes a forked child's copies of all connections; the parent's stay open."""
    for holder in list(open_holders):
        holder.abandon()


def _close_all() -> None:
    """Closes all transports at exit: sends what waits, and tells peers why this rank ended."""
    error = getattr(sys, "last_value", None)
    reason = f"{type(error).__name__}: {error}" if error is not None else ""
    for transport in list(closed_at_exit):
        transport.close(reason)


systems.call_in_forked_child(_abandon_all)
# This module is loaded before the one that ends a job at exit, so that the job is ended first.
atexit.register(_close_all)


class Joined(NamedTuple):
    """One rank's connections to all peers, for one stream.

    Attributes:
        sockets: A connected and authenticated stream socket in blocking mode for each peer.
        seals: The seals for each peer, in both directions; none if the user gave no secret.
    """

    sockets: dict[int, socket.socket]
    seals: dict[int, Seals]


def join(
    *,
    rank: int,
    ranks: int,
    store: Store,
    namespace: str,
    timeout: float,
    address: str | None = None,
    force_tcp: bool | None = None,
    streams: int = 1,
    attempt: int = 0,
) -> list[Joined]:
    """Connects this rank to all others. Collective over the ranks.

    Args:
        rank: This process's rank.
        ranks: Number of ranks that join.
        store: The store in which they find each other.
        namespace: Prefix of the keys in the store, new there.
        timeout: Seconds for all ranks to arrive.
        address: This host's address as other hosts reach it.
        force_tcp: Use TCP within a host too.
        streams: Number of connections between each two ranks, the same on all.
        attempt: Number of times that the job was started; a rank with another number is refused.

    Returns:
        For each stream, this rank's connections.

    Raises:
        ConfigError: The user's secret cannot be used.
        PipelineTimeout: Some ranks did not arrive in time.
        TransportError: The namespace was used before, no address can be bound, the ranks were
            given different secrets, or only some of a host are to use TCP within it.
    """
    user_secret = handshake.user_secret()
    meeting = Rendezvous(store, namespace, rank, ranks, timeout)
    use_tcp = os.environ.get("FLEETPIPE_FORCE_TCP") == "1" if force_tcp is None else force_tcp
    facts = {
        "tcp": "1" if use_tcp else "0",
        "host": hosts.host_identity(),
        "secret": handshake.fingerprint(user_secret, namespace),
        "token": secrets.token_hex(handshake.TOKEN_BYTES) if rank == 0 else "",
    }
    meeting.publish("host", facts)
    facts_by_rank = meeting.gather("host", range(ranks), facts.keys())
    _require_same_secret(facts_by_rank, rank)
    _require_same_tcp(facts_by_rank)
    secret = handshake.secret_of_run(user_secret, namespace, facts_by_rank[0]["token"])
    listeners = _listen([facts_by_rank[r]["host"] for r in range(ranks)], rank, use_tcp, address)
    joining = _Joining(meeting, secret, [listener.sock for listener in listeners], streams, attempt)
    try:
        addresses = ",".join(listener.address for listener in listeners)
        meeting.publish("addresses", {"addresses": addresses})
        for peer, facts_of_peer in meeting.gather("addresses", range(rank), ["addresses"]).items():
            same_host = facts_by_rank[peer]["host"] == facts["host"] != ""
            addresses_of_peer = facts_of_peer["addresses"].split(",")
            chosen = _choose_address(peer, addresses_of_peer, same_host and not use_tcp)
            _log.debug("rank %d of %s connects to rank %d at %s", rank, namespace, peer, chosen)
            joining.dial(peer, chosen)
        joined = joining.run()
        return joined if user_secret else [stream._replace(seals={}) for stream in joined]
    finally:
        joining.close()


def _require_same_secret(facts_by_rank: Mapping[int, Mapping[str, str]], rank: int) -> None:
    """Refuses ranks that have another secret than ``rank``, judged by fingerprints."""
    secret = facts_by_rank[rank]["secret"]
    differing = [peer for peer in facts_by_rank if facts_by_rank[peer]["secret"] != secret]
    if differing:
        peer = differing[0]
        raise TransportError(
            f"rank {rank} and rank {peer} were not given the same secret",
            expected="FLEETPIPE_SECRET, or the file of FLEETPIPE_SECRET_FILE, alike for all ranks",
            got=", ".join(
                f"{'a' if facts_by_rank[r]['secret'] else 'no'} secret on rank {r}"
                for r in (rank, peer)
            ),
            fix="give the same secret to every rank, or to none",
        )


def _require_same_tcp(facts_by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Refuses ranks of one host of which only some use TCP within it."""
    first_of_host: dict[str, int] = {}
    for peer, facts in facts_by_rank.items():
        other = first_of_host.setdefault(facts["host"] or f"rank {peer}", peer)
        if facts["tcp"] != facts_by_rank[other]["tcp"]:
            raise TransportError(
                f"rank {other} and rank {peer} of one host would not meet",
                expected="FLEETPIPE_FORCE_TCP alike on all ranks of a host",
                got=", ".join(f"{facts_by_rank[r]['tcp']} on rank {r}" for r in (other, peer)),
                fix="give every rank FLEETPIPE_FORCE_TCP=1, or none",
            )


def _listen(
    identities: list[str], rank: int, force_tcp: bool, address: str | None
) -> list[hosts.Listener]:
    """Opens the sockets on which the higher ranks will connect.

    Args:
        identities: The :func:`hosts.host_identity` of each rank.
        rank: This rank.
        force_tcp: Whether ranks of one host use TCP too.
        address: The address of this host for TCP; None for the one that is found.

    Returns:
        A listener for ranks of this host, one for the others, or both, as they are needed.
    """
    host = identities[rank]
    higher = identities[rank + 1 :]
    by_unix_socket = [identity == host != "" and not force_tcp for identity in higher]
    listeners = []
    if any(by_unix_socket):
        listeners.append(hosts.listen_unix())
    if not all(by_unix_socket):
        one_host = host != "" and len(set(identities)) == 1
        listeners.append(
            hosts.listen_tcp(address or ("127.0.0.1" if one_host else hosts.own_address()))
        )
    return listeners


def _choose_address(peer: int, addresses: list[str], by_unix_socket: bool) -> str:
    """Returns the address at which to reach a peer.

    Args:
        peer: The peer.
        addresses: All addresses of the peer.
        by_unix_socket: Whether to use its unix-domain address, else that of TCP.

    Raises:
        TransportError: The peer has no such address.
    """
    kind = "unix" if by_unix_socket else "tcp"
    for address in addresses:
        if address.startswith(f"{kind} "):
            return address
    raise TransportError(
        f"rank {peer} does not listen where this rank would meet it",
        expected=f"an address of kind {kind}",
        got=", ".join(addresses),
        fix="run the same fleetpipe on all ranks, with the same FLEETPIPE_FORCE_TCP",
    )


class _Dialled(NamedTuple):
    """The target of a connection that this rank opens to a lower rank.

    Attributes:
        peer: The lower rank.
        stream: The number of the connection among those to that rank.
        address: The listener's address.
    """

    peer: int
    stream: int
    address: str


class PendingConnection:
    """A connection whose other end has not yet proved that it is a peer."""

    def __init__(
        self, sock: socket.socket, exchange: handshake.Exchange, dialled: _Dialled | None = None
    ) -> None:
        """Begins a handshake; :meth:`advance` goes on with it.

        Args:
            sock: The connected socket, non-blocking.
            exchange: This end's side of the handshake.
            dialled: The target to which this end connected; None if the other end connected.
        """
        self.sock = sock
        self.dialled = dialled
        self.expires = time.monotonic() + STRANGER_SECONDS
        self._exchange = exchange
        self._received = b""
        self._step: bytes | int = next(exchange)

    def advance(self) -> handshake.Greeting | None:
        """Continues the handshake as far as the socket allows without waiting.

        Returns:
            The proved identity of the other end; None while that is not proved.

        Raises:
            OSError: The connection failed.
            Stranger: The other end is no peer.
        """
        try:
            while True:
                if isinstance(self._step, bytes):
                    # Shorter than any kernel buffer, so that it is sent whole or not at all.
                    self.sock.send(self._step, systems.MSG_NOSIGNAL)
                    self._step = next(self._exchange)
                else:
                    data = self.sock.recv(self._step - len(self._received))
                    if not data:
                        raise handshake.Stranger("it closed the connection")
                    self._received += data
                    if len(self._received) == self._step:
                        received, self._received = self._received, b""
                        self._step = self._exchange.send(received)
        except BlockingIOError:
            return None
        except StopIteration as end:
            greeting: handshake.Greeting = end.value
            return greeting


class _Joining:
    """Accepts, connects and shakes hands in one loop until all peers are connected."""

    def __init__(
        self,
        meeting: Rendezvous,
        secret: bytes,
        listeners: list[socket.socket],
        streams: int,
        attempt: int,
    ) -> None:
        """Begins to listen.

        Args:
            meeting: The exchange of facts that this rank has entered.
            secret: The run's secret.
            listeners: The sockets on which higher ranks connect.
            streams: Connections between each two ranks.
            attempt: The attempt of the job.
        """
        self._meeting = meeting
        self._secret = secret
        self._attempt = attempt
        self._warned = False
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._pending: list[PendingConnection] = []
        #: Connections to open, each with the ``time.monotonic()`` from which it may be tried.
        self._redials: list[tuple[float, _Dialled]] = []
        self._streams = [Joined({}, {}) for _ in range(streams)]
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, listener)

    def dial(self, peer: int, address: str) -> None:
        """Plans the connections to a lower rank, one for each stream; :meth:`run` opens them."""
        streams = range(len(self._streams))
        self._redials += [(0.0, _Dialled(peer, stream, address)) for stream in streams]

    def run(self) -> list[Joined]:
        """Connects all peers; returns this rank's connections by stream.

        Raises:
            PipelineTimeout: Some ranks did not arrive within the limit; the message names them.
        """
        meeting = self._meeting
        peers = {*range(meeting.ranks)} - {meeting.rank}
        while missing := {p for p in peers if any(p not in s.sockets for s in self._streams)}:
            if meeting.limit.reached():
                raise meeting.timeout_error(missing)
            now = time.monotonic()
            self._dial_due(now)
            for connection in self._unproved_connections():
                if connection.expires < now:
                    self._drop(connection)
            for key, _ in self._selector.select(_RETRY_SECONDS):
                if not isinstance(key.data, PendingConnection):
                    self._accept(key.data)
                elif key.data in self._pending:  # not dropped for one accepted in this turn
                    self._advance(key.data)
        joined, self._streams = self._streams, []
        return joined

    def close(self) -> None:
        """Closes every socket that was not handed over for a peer."""
        for connection in list(self._pending):
            self._drop(connection)
        for sock in self._listeners:
            sock.close()
        for stream in self._streams:
            for sock in stream.sockets.values():
                sock.close()
        self._selector.close()

    def _unproved_connections(self) -> list[PendingConnection]:
        """Returns the accepted connections whose other end has not proved to be a peer."""
        return [connection for connection in self._pending if connection.dialled is None]

    def _dial_due(self, now: float) -> None:
        """Tries each planned connection whose time has come."""
        due = [dialled for moment, dialled in self._redials if moment <= now]
        self._redials = [(moment, dialled) for moment, dialled in self._redials if moment > now]
        meeting = self._meeting
        for dialled in due:
            try:
                sock = hosts.dial(dialled.address)
            except OSError:
                self._redials.append((now + _RETRY_SECONDS, dialled))
                continue
            exchange = handshake.connecting_side(
                self._secret,
                meeting.rank,
                dialled.peer,
                meeting.ranks,
                dialled.stream,
                self._attempt,
            )
            self._add_pending(PendingConnection(sock, exchange, dialled), selectors.EVENT_WRITE)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts a connection and begins its handshake; drops the oldest unproved of too many."""
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if systems.is_other_user(sock):
            sock.close()
            return
        sock.setblocking(False)
        hosts.set_socket_options(sock)
        strangers = self._unproved_connections()
        if len(strangers) >= MOST_STRANGERS:
            self._drop(strangers[0])
        meeting, streams = self._meeting, len(self._streams)
        exchange = handshake.accepting_side(
            self._secret, meeting.rank, meeting.ranks, streams, self._attempt
        )
        self._add_pending(PendingConnection(sock, exchange), selectors.EVENT_READ)

    def _add_pending(self, connection: PendingConnection, event: int) -> None:
        """Adds a connection whose handshake goes on when its socket is ready for ``event``."""
        self._pending.append(connection)
        self._selector.register(connection.sock, event, connection)

    def _advance(self, connection: PendingConnection) -> None:
        """Goes on with a handshake; stores the socket once the other end is proved to be a peer."""
        try:
            greeting = connection.advance()
        except (OSError, handshake.Stranger) as error:
            self._drop(connection)
            if isinstance(error, handshake.Stale) and not self._warned:
                # Once: anybody may claim any attempt.
                self._warned = True
                _log.warning("rank %d refused %s", self._meeting.rank, error)
            return
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
        if greeting is not None:
            self._selector.unregister(connection.sock)
            self._pending.remove(connection)
            connection.sock.setblocking(True)
            stream = self._streams[greeting.stream]
            replaced = stream.sockets.pop(greeting.peer, None)
            if replaced is not None:
                replaced.close()
            stream.sockets[greeting.peer] = connection.sock
            stream.seals[greeting.peer] = greeting.seals

    def _drop(self, connection: PendingConnection) -> None:
        """Closes a connection without a proved peer; one that this rank opened is tried again."""
        self._selector.unregister(connection.sock)
        self._pending.remove(connection)
        connection.sock.close()
        if connection.dialled is not None:
            self._redials.append((time.monotonic() + _RETRY_SECONDS, connection.dialled))
