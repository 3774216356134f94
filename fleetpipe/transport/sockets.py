"""Connects ranks in separate processes by sockets, all served by one thread.

While a rank waits for anything, it keeps reading from all peers, within a limit, so that two ranks
that both send much never block each other, and the death of any rank ends every wait.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from fleetpipe.errors import PeerFailed, PipelineTimeout, TransportError
from fleetpipe.representation import shows
from fleetpipe.systems import ProcessorQueue
from fleetpipe.transport import peer_connections
from fleetpipe.transport.base import Limit, Store, Value
from fleetpipe.transport.peer_connections import DEFAULT_TIMEOUT, join
from fleetpipe.transport.stream import Connection
from fleetpipe.transport.wire.structure import MessageKey, Route, Seals, check_peer, describe

#: Bytes that may wait for a peer, on either side, before send() waits itself.
BACKLOG = 256 << 20
#: Seconds that closing waits for peers that have not received all messages.
CLOSING_SECONDS = 5.0


def connect(
    *,
    rank: int,
    ranks: int,
    store: Store,
    namespace: str,
    timeout: float = DEFAULT_TIMEOUT,
    address: str | None = None,
    force_tcp: bool | None = None,
    backlog: int = BACKLOG,
) -> SocketTransport:
    """Connects the ranks of a pipeline, each to every other. Collective.

    Args:
        rank: This process's rank, 0 to ``ranks - 1``.
        ranks: Ranks of the pipeline.
        store: The store in which they find each other, such as Paddle's ``TCPStore``.
        namespace: Prefix of this connection's keys in the store. It must be new in that store.
        timeout: Seconds for all ranks to arrive, and for ``send`` to wait for a slow peer.
        address: This host's address as other hosts reach it; by default that of
            :func:`hosts.own_address`.
        force_tcp: Use TCP within a host too. Default: whether ``FLEETPIPE_FORCE_TCP`` is 1.
        backlog: Bytes that may wait for one peer before ``send`` waits.

    Returns:
        This rank's connections.

    Raises:
        ConfigError: ``FLEETPIPE_SECRET`` cannot be used.
        PipelineTimeout: Some ranks did not arrive in time; the message says which.
        TransportError: The namespace was used before, no address can be bound, or the ranks were
            given different secrets.
    """
    ((sockets, seals),) = join(
        rank=rank,
        ranks=ranks,
        store=store,
        namespace=namespace,
        timeout=timeout,
        address=address,
        force_tcp=force_tcp,
    )
    return SocketTransport(rank, ranks, sockets, timeout=timeout, backlog=backlog, seals=seals)


@shows("rank", "ranks")
class SocketTransport:
    """Sends and receives values over sockets to all peers; see :class:`base.Transport`.

    :func:`connect` creates it. One thread at a time may use it.

    Attributes:
        awaited: The peer for whose message :meth:`receive` waits at this moment, or None.
        waited: Seconds of all waits for messages of peers so far.
        timeout: Seconds that ``send`` waits for a slow peer.
        posts: False: the kernel receives by itself; see :class:`base.Transport`.
        call: The kind of this rank's present collective call, as a number in message headers.
        in_step: The peers that make the same collective calls in the same order as this rank: a
            message of theirs from another kind of call is an error.
        messages: The number of values sent so far.
        announcements: The number of these messages that announced a new structure of their value.
        bytes_sent: The bytes of tensor data in these messages.
    """

    posts = False
    call = 0
    in_step: frozenset[int] = frozenset()

    def __init__(
        self,
        rank: int,
        ranks: int,
        sockets: Mapping[int, socket.socket],
        *,
        timeout: float,
        backlog: int = BACKLOG,
        seals: Mapping[int, Seals] | None = None,
    ) -> None:
        """Takes over one connected and authenticated socket for each peer.

        Args:
            rank: This process's rank.
            ranks: Ranks of the pipeline.
            sockets: Stream sockets, by peer.
            timeout: Seconds that ``send`` waits for a slow peer.
            backlog: Bytes that may wait for one peer before ``send`` waits.
            seals: Proofs of who sent each part of a stream, by peer; None without a secret.
        """
        self.rank = rank
        self.ranks = ranks
        self.messages = 0
        self.announcements = 0
        self.bytes_sent = 0
        self.awaited: int | None = None
        self.waited = 0.0
        self.timeout = timeout
        self._backlog = backlog
        self.connect_again(sockets, seals)

    def connect_again(
        self, sockets: Mapping[int, socket.socket], seals: Mapping[int, Seals] | None = None
    ) -> None:
        """Takes over sockets after :meth:`close`; the arguments are the constructor's."""
        self._closed = False
        self._interrupted = False
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._queue: ProcessorQueue | None = None
        self._connections = {
            peer: Connection(sock, self.rank, peer, self._wake, (seals or {}).get(peer))
            for peer, sock in sockets.items()
        }
        for connection in self._connections.values():
            self._selector.register(connection.fd, selectors.EVENT_READ, connection)
        # Connections that the selector does not watch: ended ones, and those of peers that have
        # sent more messages ahead than are stored here.
        self._ended: list[Connection] = []
        self._full: set[Connection] = set()
        peer_connections.open_holders.add(self)
        peer_connections.closed_at_exit.add(self)

    def post(self, peer: int, key: MessageKey) -> None:
        """Does nothing: the kernel receives by itself."""

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Hands a value to the kernel or the writer; see :meth:`base.Transport.send`.

        Waits only if ``backlog`` bytes already wait for the peer.
        """
        connection = self._connections.get(peer) or self._raise_unconnected(peer, key)
        if connection.outbox.backlog >= self._backlog:
            self._make_room(connection, key)
        nbytes, announced = connection.send(key, value, self.call)
        self.messages += 1
        self.announcements += announced
        self.bytes_sent += nbytes

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Takes a message if it has arrived; see :meth:`base.Transport.try_receive`.

        Raises:
            PeerFailed: The peer is gone; or it sent the message in another kind of collective call
                than this rank's, though it is one of ``in_step``.
            TransportError: The peer's stream is damaged.
        """
        connection = self._connections.get(peer) or self._raise_unconnected(peer, key)
        arrived, value, call = connection.inbox.take(key)
        # A message of kind "L" may be taken in a later call than that in which it was sent.
        if arrived and call != self.call and peer in self.in_step and key.kind != "L":
            raise PeerFailed(
                f"rank {peer} is at another collective call than rank {self.rank}",
                where=str(Route(key, peer, self.rank)),
                fix="have every rank make the same calls in the same order",
            )
        if not arrived and connection.inbox.ended:
            raise connection.failure(Route(key, peer, self.rank))
        return arrived, value

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """Waits for a message; see :meth:`base.Transport.receive`.

        Raises:
            PeerFailed: The peer is gone, or sent from another kind of call; or this transport was
                interrupted, or any peer ended before its work was done.
            PipelineTimeout: The message did not come in time.
            TransportError: The peer's stream is damaged.
        """
        limit, peers = Limit(timeout), (peer,)
        while True:
            arrived, value = self.try_receive(peer, key)
            inbox = self._connections[peer].inbox
            # The delay after the last wait concerns only the messages that were just read.
            inbox.delay = None
            if arrived:
                return value
            inbox.prepare(key)
            self._raise_if_any_died(Route(key, peer, self.rank))
            if not self._wait(limit, peers):
                raise self._receive_timeout(peer, key, timeout)

    def await_any(
        self, messages: Sequence[tuple[int, MessageKey]], timeout: float, patience: float
    ) -> None:
        """Waits until one of several messages has come.

        Raises:
            PeerFailed: A peer is gone, or this transport was interrupted.
            PipelineTimeout: None of the messages came in time.
            TransportError: A peer's stream is damaged.
        """
        peers = [peer for peer, _ in messages]
        limit, end = Limit(timeout), time.monotonic() + patience
        while not self._has_any(messages):
            seconds = end - time.monotonic()
            if seconds <= 0:
                return
            peer, key = messages[0]
            self._raise_if_any_died(Route(key, peer, self.rank))
            if not self._wait(limit, peers, seconds):
                raise self._receive_timeout(peer, key, timeout, len(messages) - 1)

    def _has_any(self, messages: Sequence[tuple[int, MessageKey]]) -> bool:
        """Reads what the peers have sent; returns whether one of the messages has come.

        It also allocates memory for the messages, now that this rank has nothing else to do.

        Args:
            messages: The messages, each as the rank that sends it and its key.

        Raises:
            PeerFailed: A peer is gone, and none of the messages has come.
        """
        has_come = False
        for peer, key in messages:
            connection = self._connections.get(peer) or self._raise_unconnected(peer, key)
            inbox = connection.inbox
            inbox.fill(sys.maxsize)
            # The delay after the last wait concerns only the messages that were just read.
            inbox.delay = None
            has_come = has_come or inbox.has(key)
            if inbox.ended and not has_come:
                raise connection.failure(Route(key, peer, self.rank))
            inbox.prepare(key)
        return has_come

    def queues(self) -> tuple[int, int]:
        """Returns the number of keys with untaken messages, and that of unsent bytes.

        Any thread may call it.
        """
        connections = self._connections.values()
        messages = sum(connection.inbox.messages for connection in connections)
        return messages, sum(connection.outbox.backlog for connection in connections)

    def flights(self) -> dict[int, float]:
        """Returns by peer the seconds that a message took: see :meth:`inbox.Inbox.flight`.

        Peers of which no message has come since the last call are left out.
        """
        connections = self._connections.items()
        flights = {peer: connection.inbox.flight() for peer, connection in connections}
        return {peer: flight for peer, flight in flights.items() if flight is not None}

    def flush(self, timeout: float) -> None:
        """Waits until the kernel has taken everything; see :meth:`base.Transport.flush`."""
        limit = Limit(timeout)
        while True:
            waiting = {p: c.outbox.backlog for p, c in self._connections.items()}
            # The peers to which some bytes are not handed over yet.
            behind = [peer for peer, backlog in waiting.items() if backlog]
            if not behind:
                return
            for peer in behind:
                self._connections[peer].outbox.request_wake()
            if any(self._connections[p].outbox.backlog for p in behind) and not self._wait(limit):
                who = f"ranks {behind}" if behind[1:] else f"rank {behind[0]}"
                raise PipelineTimeout(
                    f"rank {self.rank} could not hand over all its messages to {who} "
                    f"in {timeout:g} s",
                    got="; ".join(f"{waiting[p]} bytes wait for rank {p}" for p in behind),
                    cause="these ranks do not receive: they are computing, stuck or stopped",
                    fix=f"read the log of {who}; raise the timeout if it is only slow",
                )

    def close(self, reason: str = "") -> None:
        """Says goodbye to every peer and ends the connections; see :meth:`base.Transport.close`.

        Waits at most ``CLOSING_SECONDS`` for peers that have not received all messages.

        Args:
            reason: Why this rank leaves before its work is done; the peers' errors repeat it.
        """
        if self._closed:
            return
        for connection in self._connections.values():
            connection.leave(reason)
        # After a failure nobody takes the messages that are left, so they are not waited for.
        limit = 0.0 if self._interrupted else CLOSING_SECONDS
        with contextlib.suppress(PipelineTimeout, TransportError):
            self.flush(limit)
        for connection in self._connections.values():
            connection.close(limit)
        self._release()

    def abandon(self) -> None:
        """Closes this process's copies of the sockets after a fork; the parent's stay open."""
        for connection in self._connections.values():
            connection.abandon()
        self._release()

    def _release(self) -> None:
        """Closes all but the connections, which the caller has closed, and forgets them."""
        self._closed = True
        self._connections = {}
        self._queue = None
        self._selector.close()
        peer_connections.open_holders.discard(self)
        peer_connections.closed_at_exit.discard(self)
        self._woken.close()
        self._waker.close()

    def _raise_unconnected(self, peer: int, key: MessageKey) -> NoReturn:
        """Raises the error for a peer without a connection.

        Args:
            peer: The rank to send to, or to receive from.
            key: The key of the message.

        Raises:
            TransportError: The peer is not another rank, or this transport is closed.
        """
        check_peer(self.rank, self.ranks, peer, key)
        raise TransportError(
            f"the transport of rank {self.rank} is closed",
            where=describe(key),
            fix="do not use it after close()",
        )

    def _make_room(self, connection: Connection, key: MessageKey) -> None:
        """Waits until less than ``backlog`` bytes wait for the peer of a connection.

        Args:
            connection: The connection.
            key: The key of the message that is to be sent, for errors.

        Raises:
            PeerFailed: A rank died during the wait.
            PipelineTimeout: The peer has not taken enough bytes within the transport's limit.
        """
        limit = Limit(self.timeout)
        route = Route(key, self.rank, connection.peer)
        while True:
            connection.outbox.request_wake()
            if connection.outbox.backlog < self._backlog:
                return
            self._raise_if_any_died(route)
            if not self._wait(limit):
                raise PipelineTimeout(
                    f"rank {self.rank} could not send for {self.timeout:g} s",
                    where=str(route),
                    expected=f"less than {self._backlog} bytes of earlier messages to be waiting",
                    got=f"{connection.outbox.backlog} bytes wait for rank {connection.peer}",
                    cause=f"rank {connection.peer} is stuck, stopped or much slower",
                    fix="see where that rank is; raise the timeout if it only needs longer",
                )

    def _wait(self, limit: Limit, awaited: Sequence[int] = (), longest: float = math.inf) -> bool:
        """Sleeps until something arrives or leaves; reads messages of other peers meanwhile.

        Args:
            limit: The limit of the caller's wait.
            awaited: Peers whose messages the caller reads itself.
            longest: Seconds, above 0, after which the sleep ends in any case.

        Returns:
            False if the limit is reached.
        """
        nap = min(limit.nap(), longest)
        if not nap:
            return False
        for connection in list(self._full):
            if connection.peer in awaited or connection.inbox.nbytes < self._backlog:
                self._full.discard(connection)
                self._selector.register(connection.fd, selectors.EVENT_READ, connection)
        self.awaited = next(iter(awaited), None)
        # Created here, since it measures the thread that creates it: the one that waits.
        queue = self._queue = self._queue or ProcessorQueue()
        queued, begin = queue.seconds(), time.monotonic()
        ready = self._selector.select(nap)
        # Seconds for which this thread was ready to run, and had no processor.
        delay = queue.seconds() - queued
        if awaited:
            self.waited += time.monotonic() - begin
        self.awaited = None
        for registered, _ in ready:
            if registered.data is None:  # ``_wake`` was called, by another thread
                self._woken.recv(4096)
                continue
            registered.data.inbox.delay = delay
            if registered.data.peer not in awaited:
                self._read_ahead(registered.data)
                registered.data.inbox.delay = None
        return True

    def _read_ahead(self, connection: Connection) -> None:
        """Stores messages that a peer sent before they are awaited, up to ``backlog`` bytes."""
        inbox = connection.inbox
        try:
            inbox.fill(self._backlog)
        finally:
            full = inbox.nbytes >= self._backlog
            if inbox.ended:
                self._ended.append(connection)
            elif full:
                self._full.add(connection)
            if inbox.ended or full:
                self._selector.unregister(connection.fd)

    def interrupt(self) -> None:
        """Ends every wait of the thread that uses this transport; any thread may call it."""
        self._interrupted = True
        if not self._closed:
            self._wake()

    def _raise_if_any_died(self, route: Route) -> None:
        """Raises an error if this transport was interrupted, or a peer ended too early.

        That is a peer whose connection ended without a goodbye, or whose goodbye gives an error as
        its reason. A peer that has done all its work says goodbye without a reason.

        Args:
            route: The message that this rank waits for or sends, for the error.
        """
        if self._interrupted:
            raise interruption_error(route)
        for connection in self._ended:
            inbox = connection.inbox
            if not inbox.orderly or inbox.reason:
                raise connection.failure(route)

    def _receive_timeout(
        self, peer: int, key: MessageKey, timeout: float, alternatives: int = 0
    ) -> PipelineTimeout:
        """Returns the error that neither a message nor one of its ``alternatives`` came in time.

        Args:
            peer: The rank that should have sent the message.
            key: The message's key.
            timeout: The limit in seconds.
            alternatives: The number of other messages that would have ended the wait too.
        """
        got = f"from rank {peer}: {self._connections[peer].inbox.summary()}"
        text = f", or one of {alternatives} others that it could go on with" * (alternatives > 0)
        return message_timeout(Route(key, peer, self.rank), timeout, text, got)

    def _wake(self) -> None:
        """Ends the present sleep of the waiting thread; any thread may call it."""
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"w")


def message_timeout(
    route: Route, timeout: float, alternatives: str = "", got: str | None = None
) -> PipelineTimeout:
    """Returns the error that a message did not come within a limit.

    Args:
        route: The message.
        timeout: The limit in seconds.
        alternatives: A text about other messages that would have ended the wait too.
        got: A text about what has arrived from the sender.
    """
    peer = route.source
    return PipelineTimeout(
        f"rank {route.target} waited {timeout:g} s for a message of rank {peer}",
        where=str(route),
        expected=f"{describe(route.key)} to arrive{alternatives}",
        got=got,
        cause=f"rank {peer} is computing, is stuck or stopped, or follows another schedule",
        fix=f"see where rank {peer} is; raise the timeout if it only needs longer",
    )


def interruption_error(route: Route) -> PeerFailed:
    """Returns the error of a wait that ends because another rank of the job failed."""
    return PeerFailed(
        "a rank of the job failed while this one waited",
        where=str(route),
        fix="read the logs of the other ranks",
    )
