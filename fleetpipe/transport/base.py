"""The interfaces that the engine and the transports share, and a view of some ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from fleetpipe.representation import shows
from fleetpipe.transport.wire.message import MessageKey, check_peer

# A Tensor, None, bool, int, float, str, or a tuple, list or dict with str keys of these. An exact
# recursive type would refuse a list[Tensor] where a list[Value] is asked for, so the rule is
# checked at run time, where the message can name the place inside the value.
Value = Any

#: What tensors between the ranks of a launched job may go over.
SOCKETS, PROCESS_GROUP = "sockets", "process_group"


class Store(Protocol):
    """The part of Paddle's ``TCPStore`` through which ranks find each other."""

    def set(self, key: str, value: str) -> object:
        """Stores ``value`` under ``key``."""

    def get(self, key: str) -> bytes:
        """Returns the value of ``key``; may block for ever if the key is missing."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that begins at 0 and returns its new value; never blocks."""


class Transport(Protocol):
    """One rank's connections to the other ranks of its pipeline. Used by one thread at a time.

    Attributes:
        rank: This rank, 0 to ``ranks - 1``.
        ranks: Ranks of the pipeline.
        posts: Whether receives are to be announced by :meth:`post`, which else does nothing.
    """

    rank: int
    ranks: int
    posts: bool

    @property
    def messages(self) -> int:
        """Messages sent so far."""

    @property
    def announcements(self) -> int:
        """Number of those messages that had to describe their structure."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensor data sent so far."""

    def post(self, peer: int, key: MessageKey) -> None:
        """Announces a receive, which an asynchronous transport starts."""

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Sends a value without waiting for the receive.

        The tensors in it must not be modified in place afterwards.

        Raises:
            BoundaryError: The value holds something that cannot cross; the message says where.
            PeerFailed: The peer is gone.
            PipelineTimeout: The peer has not taken earlier messages for the transport's limit.
        """

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) if the message has arrived, else (False, None), at once.

        Raises:
            PeerFailed: The message has not arrived and the peer is gone.
        """

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """Waits for a message and returns its value.

        Received tensors are leaves with the dtype, shape and ``stop_gradient`` of the sent ones.

        Raises:
            PeerFailed: The peer is gone, or another one died during the wait.
            PipelineTimeout: The message did not arrive within ``timeout`` seconds.
        """

    def flush(self, timeout: float) -> None:
        """Waits until all sent messages have left this process.

        Raises:
            PipelineTimeout: Something is still here after ``timeout`` seconds.
        """

    def close(self) -> None:
        """Ends the connections; what was sent before is still delivered. May be repeated."""


class AnyOrderTransport(Transport, Protocol):
    """A transport whose receiver can wait for whichever of several messages comes first."""

    def await_any(
        self, messages: Sequence[tuple[int, MessageKey]], timeout: float, patience: float
    ) -> None:
        """Waits until one of some messages can be taken.

        Args:
            messages: Peers and keys; errors name the first.
            timeout: Seconds that it may last.
            patience: Seconds after which it ends without an error, if they are fewer.

        Raises:
            PeerFailed: A peer is gone, or another one died during the wait.
            PipelineTimeout: None of them arrived within ``timeout`` seconds.
        """


@shows("rank", "ranks")
class View:
    """Renumbers some ranks of a transport; see :class:`base.Transport`.

    It has no connections of its own: messages of two views with the same key are the same messages,
    and its counters are those of the whole transport. Errors name ranks of the transport.

    Attributes:
        members: The members' ranks in the transport, by their number here.
    """

    def __init__(self, transport: Transport, members: Sequence[int]) -> None:
        """Creates a view of ``transport``.

        Args:
            transport: This rank's connections, to others too.
            members: The ranks in the view, in the same order on all of them, this rank included.
        """
        self.members = tuple(members)
        self.rank = self.members.index(transport.rank)
        self.ranks = len(self.members)
        self.posts = transport.posts
        self._transport = transport

    @property
    def messages(self) -> int:
        """Messages that the transport has sent so far."""
        return self._transport.messages

    @property
    def announcements(self) -> int:
        """Number of those messages that had to describe their structure."""
        return self._transport.announcements

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensor data that the transport has sent so far."""
        return self._transport.bytes_sent

    def post(self, peer: int, key: MessageKey) -> None:
        """Announces a receive; see :meth:`base.Transport.post`."""
        self._transport.post(self._rank_of(peer, key), key)

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Sends a value; see :meth:`base.Transport.send`."""
        whole = self.members[peer] if 0 <= peer < self.ranks else self._rank_of(peer, key)
        self._transport.send(whole, key, value)

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Takes a message if it has arrived; see :meth:`base.Transport.try_receive`."""
        whole = self.members[peer] if 0 <= peer < self.ranks else self._rank_of(peer, key)
        return self._transport.try_receive(whole, key)

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """Waits for a message; see :meth:`base.Transport.receive`."""
        return self._transport.receive(self._rank_of(peer, key), key, timeout)

    def await_any(
        self, messages: Sequence[tuple[int, MessageKey]], timeout: float, patience: float
    ) -> None:
        """Waits for any of some messages, where the transport can; see there."""
        whole = cast("AnyOrderTransport", self._transport)
        whole.await_any([(self._rank_of(*one), one[1]) for one in messages], timeout, patience)

    def flush(self, timeout: float) -> None:
        """Waits until all messages of the whole transport have left."""
        self._transport.flush(timeout)

    def close(self) -> None:
        """Does nothing: the connections are the transport's."""

    def _rank_of(self, peer: int, key: MessageKey) -> int:
        if not 0 <= peer < self.ranks:
            check_peer(self.rank, self.ranks, peer, key)
        return self.members[peer]
