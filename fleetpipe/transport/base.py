"""The interfaces that the engine and the transports share, and the limits of their waits.

A limit starts again after the process was stopped, by a debugger or by a batch system that suspends
a whole job. By its clock all other ranks are overdue then, but they may have been stopped too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from fleetpipe.errors import FleetPipeError
from fleetpipe.representation import shows
from fleetpipe.transport.wire.structure import MessageKey, check_peer

# A Tensor, None, bool, int, float, str, or a tuple, list or dict with str keys of these. An exact
# recursive type would refuse a list[Tensor] where a list[Value] is asked for, so the rule is
# checked at run time, where the message can name the part of the value.
Value = Any

#: The options for how a launched job sends the tensors of its pipeline.
SOCKETS, PROCESS_GROUP = "sockets", "process_group"

#: A wait looks at its limit at least this often, in seconds.
LOOK_SECONDS = 0.5
#: A wait that did not look for so long was stopped; a request to a store may take 2 s of it.
STOPPED_SECONDS = 5.0
#: Seconds between two polls of a store: at first, and at most; each pause doubles the one before.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02


class Store(Protocol):
    """A job's key-value store, by which ranks find each other: a part of Paddle's ``TCPStore``."""

    def set(self, key: str, value: str) -> object:
        """Stores ``value`` under ``key``."""

    def get(self, key: str) -> bytes:
        """Returns the value of ``key``; may block for ever if the key is missing."""

    def add(self, key: str, amount: int) -> int:
        """Adds ``amount`` to the counter ``key``, first 0; returns the sum; never blocks."""


class Transport(Protocol):
    """One rank's connections to the other ranks of its pipeline. Used by one thread at a time.

    Attributes:
        rank: This rank, 0 to ``ranks - 1``.
        ranks: Ranks of the pipeline.
        posts: Whether the engine should announce receives by :meth:`post`; if not, it does nothing.
    """

    rank: int
    ranks: int
    posts: bool

    @property
    def messages(self) -> int:
        """Messages sent so far."""

    @property
    def announcements(self) -> int:
        """Number of sent messages that had to describe the structure of their value."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensor data sent so far."""

    def post(self, peer: int, key: MessageKey) -> None:
        """Announces a later receive of ``key`` from ``peer``: its transfer may start early."""

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
    """Adds to a transport a wait for whichever of several messages comes first."""

    def await_any(
        self, messages: Sequence[tuple[int, MessageKey]], timeout: float, patience: float
    ) -> None:
        """Waits until one of several messages can be received.

        Args:
            messages: The sender and the key of each; errors name the first message.
            timeout: Seconds without any of the messages after which the wait fails.
            patience: Seconds after which the wait ends without an error, if that is sooner.

        Raises:
            PeerFailed: A sender is gone, or another rank died during the wait.
            PipelineTimeout: None of the messages arrived within ``timeout`` seconds.
        """


@shows("rank", "ranks")
class View:
    """A transport among some ranks of another transport, with numbers of their own from 0.

    A view has no connections of its own: messages of two views with the same key are the same
    messages, and its counters are those of the whole transport. Errors name ranks of the transport.

    Attributes:
        members: For each rank of the view, its rank in the transport.
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
        """Number of sent messages that had to describe the structure of their value."""
        return self._transport.announcements

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensor data that the transport has sent so far."""
        return self._transport.bytes_sent

    def post(self, peer: int, key: MessageKey) -> None:
        """Announces that the message ``key`` of ``peer`` will be received."""
        self._transport.post(self._transport_rank(peer, key), key)

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Sends a value to ``peer``, without waiting for the receive."""
        rank = self.members[peer] if 0 <= peer < self.ranks else self._transport_rank(peer, key)
        self._transport.send(rank, key, value)

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) if the message has arrived, else (False, None)."""
        rank = self.members[peer] if 0 <= peer < self.ranks else self._transport_rank(peer, key)
        return self._transport.try_receive(rank, key)

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """Waits for a message and returns its value."""
        return self._transport.receive(self._transport_rank(peer, key), key, timeout)

    def await_any(
        self, messages: Sequence[tuple[int, MessageKey]], timeout: float, patience: float
    ) -> None:
        """Waits until one of several messages has come; the transport is an AnyOrderTransport."""
        transport = cast("AnyOrderTransport", self._transport)
        renumbered = [(self._transport_rank(peer, key), key) for peer, key in messages]
        transport.await_any(renumbered, timeout, patience)

    def flush(self, timeout: float) -> None:
        """Waits until all messages of the transport under this view have left."""
        self._transport.flush(timeout)

    def close(self) -> None:
        """Does nothing: the connections belong to the transport under this view."""

    def _transport_rank(self, peer: int, key: MessageKey) -> int:
        """Returns the transport's number of the rank ``peer`` of this view; errors name ``key``.

        Raises:
            TransportError: ``peer`` is not another rank of the view.
        """
        if not 0 <= peer < self.ranks:
            check_peer(self.rank, self.ranks, peer, key)
        return self.members[peer]


class Limit:
    """The time limit of one wait, which starts again if the process was stopped.

    The wait asks for the time left at least every ``LOOK_SECONDS``. A gap of more than
    ``STOPPED_SECONDS`` means that the process was stopped or had other work.
    """

    def __init__(self, seconds: float) -> None:
        """Starts a limit of ``seconds``."""
        self._seconds = seconds
        self._last_look = time.monotonic()
        self._end = self._last_look + seconds

    def seconds_left(self) -> float:
        """Returns the seconds that are left; 0 or less if the limit is reached."""
        now = time.monotonic()
        if now - self._last_look > STOPPED_SECONDS:
            self._end = now + self._seconds
        self._last_look = now
        return self._end - now

    def reached(self) -> bool:
        """Returns whether no time is left."""
        return self.seconds_left() <= 0

    def nap(self) -> float:
        """Returns the seconds that the wait may sleep before it must ask again."""
        return max(0.0, min(self.seconds_left(), LOOK_SECONDS))


def await_keys(
    store: Store,
    keys: Mapping[int, str],
    limit: Limit,
    failure: Callable[[list[int], set[int]], FleetPipeError],
    gone: Callable[[], Collection[int]] = tuple,
    given_up: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Waits until each rank has added to its counter in a store; yields each rank once it has.

    Every wait for other ranks at a store uses this function, since a store's ``get`` may block for
    ever. It polls only the first missing rank: a wait in which no rank is late asks once per rank.

    Args:
        store: The store. It may raise the error of a failed rank while a rank is missing.
        keys: For each awaited rank, the key of the counter to which that rank adds.
        limit: The limit of the whole wait.
        failure: Returns the error to raise, given the missing ranks and those of them that ended.
        gone: Returns the ranks that have ended so far.
        given_up: Returns whether another rank has reached its limit, which ends this wait too.

    Raises:
        FleetPipeError: The error of ``failure``: the limit is reached, or a missing rank has ended.
    """
    waiting = sorted(keys)
    pause = _FIRST_PAUSE
    failed = False
    while waiting:
        # Before the store is asked: a rank that has ended by now has added to its key, or never
        # will.
        ended = set(gone())
        try:
            while waiting and store.add(keys[waiting[0]], 0):
                yield waiting.pop(0)
            late = bool(waiting) and (limit.reached() or given_up())
        except FleetPipeError:
            # The failed rank may have added to its key meanwhile, and have failed after that.
            if failed:
                raise
            failed = True
            continue
        if late or ended.intersection(waiting):
            missing = [rank for rank in waiting if not store.add(keys[rank], 0)]
            if missing and (late or ended.intersection(missing)):
                raise failure(missing, ended.intersection(missing))
        if waiting:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
