"""Some ranks of a transport, as if they had connections of their own."""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.representation import shows
from fleetpipe.transport.base import Transport, Value
from fleetpipe.transport.wire.message import MessageKey, check_peer


@shows("rank", "ranks")
class View:
    """Numbers some ranks of a transport anew; see :class:`base.Transport`.

    It has no connections: messages of two views that name the same key are the same messages, and
    what counts messages counts those of the whole transport. Errors name ranks of the transport.

    Attributes:
        members: The members' ranks in the transport, by their number here.
    """

    def __init__(self, transport: Transport, members: Sequence[int]) -> None:
        """Makes a view of ``transport``.

        Args:
            transport: This rank's connections, to others too.
            members: Its ranks that take part, in the same order on all of them; one is this rank.
        """
        self.members = tuple(members)
        self.rank = self.members.index(transport.rank)
        self.ranks = len(self.members)
        self._transport = transport

    @property
    def messages(self) -> int:
        """Messages that the transport has sent so far."""
        return self._transport.messages

    @property
    def announcements(self) -> int:
        """How many of them had to describe their structure."""
        return self._transport.announcements

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensor data that the transport has sent so far."""
        return self._transport.bytes_sent

    def post(self, peer: int, key: MessageKey) -> None:
        """Says that a receive is coming; see :meth:`base.Transport.post`."""
        self._transport.post(self._rank_of(peer, key), key)

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Hands a value over; see :meth:`base.Transport.send`."""
        self._transport.send(self._rank_of(peer, key), key, value)

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Takes a message that has arrived; see :meth:`base.Transport.try_receive`."""
        return self._transport.try_receive(self._rank_of(peer, key), key)

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """Waits for a message; see :meth:`base.Transport.receive`."""
        return self._transport.receive(self._rank_of(peer, key), key, timeout)

    def flush(self, timeout: float) -> None:
        """Waits until everything that the transport was given has left."""
        self._transport.flush(timeout)

    def close(self) -> None:
        """Does nothing: the connections are the transport's."""

    def _rank_of(self, peer: int, key: MessageKey) -> int:
        if not 0 <= peer < self.ranks:
            check_peer(self.rank, self.ranks, peer, key)
        return self.members[peer]
