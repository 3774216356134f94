"""Sends messages between the ranks that one process plays, without copying their tensors."""

from __future__ import annotations

from collections import deque

from fleetpipe.errors import PeerFailed, PipelineTimeout
from fleetpipe.representation import shows
from fleetpipe.transport.base import Value
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.bridge import Unfit, take_apart
from fleetpipe.transport.wire.structure import (
    MessageKey,
    Route,
    Structure,
    Tree,
    check_key,
    check_peer,
)


@shows(endpoints="_endpoints")
class MemoryHub:
    """The mailbox through which the ranks of one process send messages to each other.

    All ranks run on one thread, so that a missing message cannot come while its receiver waits:
    ``receive`` then fails at once.
    """

    def __init__(self, ranks: int) -> None:
        """Creates the endpoints of ranks 0 to ``ranks - 1``."""
        self._endpoints = [MemoryTransport(self, rank, ranks) for rank in range(ranks)]

    def endpoint(self, rank: int) -> MemoryTransport:
        """Returns the transport of one rank, the same object each time."""
        return self._endpoints[rank]


@shows("rank", "ranks")
class MemoryTransport:
    """Sends and receives values inside a :class:`MemoryHub`; see :class:`base.Transport`.

    The receiver gets a detached tensor that shares the sent one's data; nothing is copied.
    """

    posts = False

    def __init__(self, hub: MemoryHub, rank: int, ranks: int) -> None:
        """Creates the endpoint of ``rank``; :class:`MemoryHub` calls it."""
        self.rank = rank
        self.ranks = ranks
        self.messages = 0
        self.announcements = 0
        self.bytes_sent = 0
        self._hub = hub
        self._closed = False
        self._inbox: dict[tuple[int, MessageKey], deque[Value]] = {}
        self._structures: dict[tuple[int, str, int, int, str], Structure] = {}

    def post(self, peer: int, key: MessageKey) -> None:
        """Does nothing: messages are there as soon as they are sent."""

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Puts a value into the mailbox of ``peer``, under ``key``."""
        try:
            tree, tensors = take_apart(value)
        except Unfit as unfit:
            raise unfit.error(Route(key, self.rank, peer)) from None
        structure = self._structure_of(peer, key, tree)
        target = self._hub.endpoint(peer)
        if self._closed or target._closed:
            raise self._closed_error(peer, Route(key, self.rank, peer))
        self.messages += 1
        self.bytes_sent += structure.nbytes
        leaves = bridge.detach(tensors)
        target._inbox.setdefault((self.rank, key), deque()).append(structure.rebuild(leaves))

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) if the message is in the mailbox, else (False, None)."""
        queue = self._inbox.get((peer, key))
        if queue is None:
            check_peer(self.rank, self.ranks, peer, key)
            if self._closed or self._hub.endpoint(peer)._closed:
                raise self._closed_error(peer, Route(key, peer, self.rank))
            return False, None
        value = queue.popleft()
        if not queue:
            del self._inbox[peer, key]
        return True, value

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """Takes a message that must be there, and returns its value.

        Raises:
            PeerFailed: It is not there and the peer is closed.
            PipelineTimeout: It is not there; raised at once, whatever ``timeout`` is.
        """
        arrived, value = self.try_receive(peer, key)
        if not arrived:
            raise PipelineTimeout(
                f"rank {self.rank} waits for a message that cannot come",
                where=str(Route(key, peer, self.rank)),
                expected=f"rank {peer} to have sent it",
                got="one process plays all ranks on one thread: nobody can send while one waits",
                fix="verify the plan: in its order this receive stands before the send",
            )
        return value

    def flush(self, timeout: float) -> None:
        """Does nothing: no message is ever under way."""

    def close(self) -> None:
        """Closes this rank's endpoint; earlier messages can still be received."""
        self._closed = True

    def _closed_error(self, peer: int, route: Route) -> PeerFailed:
        """Returns the error that says which of the two endpoints of a message is closed."""
        return PeerFailed(
            f"rank {self.rank if self._closed else peer} has closed its transport",
            where=str(route),
            fix="close a transport only when all its messages are sent and received",
        )

    def _structure_of(self, peer: int, key: MessageKey, tree: Tree) -> Structure:
        """Returns the structure of a value that ``peer`` is sent under ``key``.

        A structure that differs from the last one of this peer, edge and name counts as an
        announcement, as over a socket.
        """
        channel = (peer, *key[:4])
        structure = self._structures.get(channel)
        if structure is None or structure.tree != tree:
            check_peer(self.rank, self.ranks, peer, key)
            check_key(key)
            structure = self._structures[channel] = Structure(tree)
            self.announcements += 1
        return structure
