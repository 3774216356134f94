"""Sends tensors to neighbours by Paddle's process groups, everything else over sockets.

Each message is a small header on a stream and, per tensor, an ``isend``; the receiver calls
``irecv`` when it has read the header. Headers of one peer arrive in the order of its sends, so both
ends start their transfers in one order whatever the order of the receives. Each direction has a
group of its own, so that neither end's sends delay its receives.

NCCL's calls return at once. Gloo's block until the peer has made its call too, and fail after 30 s:
there each direction has a thread at both ends and a stream of its own, and the sender calls
``isend`` only when the receiver's thread has answered that it is about to call ``irecv``. No
machine with a GPU has run this: NCCL is tested with substitutes for Paddle's calls, Gloo itself is
tested.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from fleetpipe.representation import shows
from fleetpipe.transport.base import Transport, Value
from fleetpipe.transport.lanes import Incoming, Lane, Outgoing, ThreadedIncoming, ThreadedOutgoing
from fleetpipe.transport.wire.structure import MessageKey


@shows("rank", "ranks")
class ProcessGroupTransport:
    """Sends tensors to neighbours by process groups, the rest by sockets; see ``base.Transport``.

    On a GPU a wait for tensor data itself is not bounded here: a peer that dies between its header
    and its data ends the wait through NCCL's own watchdog.

    Attributes:
        posts: Whether receives should be announced; see :class:`base.Transport`.
        awaited: The peer for whose message :meth:`receive` waits at this moment, or None.
        waited: Seconds of all waits for messages of neighbours so far.
        timeout: Seconds that a peer may take to answer a header.
    """

    posts = True

    def __init__(
        self,
        sockets: Transport,
        outgoing: Mapping[int, Lane],
        incoming: Mapping[int, Lane],
        timeout: float,
    ) -> None:
        """Adds transfers by process groups to a transport over sockets.

        Args:
            sockets: Connections of the same rank, which carry the messages to ranks that are not
                neighbours.
            outgoing: For each neighbour, the lane to it.
            incoming: For each neighbour, the lane from it.
            timeout: Seconds that a peer may take to answer a header.
        """
        self.rank = sockets.rank
        self.ranks = sockets.ranks
        self.awaited: int | None = None
        self.waited = 0.0
        self.timeout = timeout
        self._sockets = sockets
        self.connect_again(outgoing, incoming)

    def connect_again(self, outgoing: Mapping[int, Lane], incoming: Mapping[int, Lane]) -> None:
        """Takes over new lanes to and from each neighbour, after the earlier ones have ended."""
        self.messages = self.announcements = self.bytes_sent = 0
        self._outgoing = {
            peer: (Outgoing if lane.interrupt is None else ThreadedOutgoing)(self.rank, lane)
            for peer, lane in outgoing.items()
        }
        self._incoming = {
            peer: (Incoming if lane.interrupt is None else ThreadedIncoming)(self.rank, lane)
            for peer, lane in incoming.items()
        }
        self._directions: list[Outgoing | Incoming] = [
            *self._outgoing.values(),
            *self._incoming.values(),
        ]

    def post(self, peer: int, key: MessageKey) -> None:
        """Starts the transfers of all messages of ``peer`` whose headers have come."""
        if peer in self._incoming:
            self._incoming[peer].start_arrived()

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Sends a header and starts the transfers of the value's tensors."""
        outgoing = self._outgoing.get(peer)
        if outgoing is None:
            self._sockets.send(peer, key, value)
            return
        nbytes, announced = outgoing.send(key, value, self.timeout)
        self.messages += 1
        self.announcements += announced
        self.bytes_sent += nbytes

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) if a message's data has come, else (False, None)."""
        incoming = self._incoming.get(peer)
        return (
            self._sockets.try_receive(peer, key) if incoming is None else incoming.try_receive(key)
        )

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """Waits for a message and returns its value."""
        incoming = self._incoming.get(peer)
        if incoming is None:
            return self._sockets.receive(peer, key, timeout)
        self.awaited, begin = peer, time.monotonic()
        try:
            return incoming.receive(key, timeout)
        finally:
            self.awaited = None
            self.waited += time.monotonic() - begin

    def flush(self, timeout: float) -> None:
        """Waits until all sent messages have left this process."""
        for outgoing in self._outgoing.values():
            outgoing.flush(timeout)
        self._sockets.flush(timeout)

    def interrupt(self) -> None:
        """Ends every wait for a neighbour; any thread may call it."""
        for direction in self._directions:
            direction.interrupt()

    def close(self) -> None:
        """Closes the lanes' streams and the sockets; Paddle's groups stay open."""
        for direction in self._directions:
            direction.close()
        self._sockets.close()
