"""The interfaces between transports and what uses them: the engine above, the store below."""

from __future__ import annotations

from typing import Any, Protocol

from fleetpipe.transport.wire.message import MessageKey

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
        """Returns the value of ``key``; may block for ever where there is none."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that begins at 0 and returns its new value; never blocks."""


class Transport(Protocol):
    """One rank's connections to the other ranks of its pipeline. Used by one thread at a time.

    Attributes:
        rank: This rank, 0 to ``ranks - 1``.
        ranks: Ranks of the pipeline.
    """

    rank: int
    ranks: int

    @property
    def messages(self) -> int:
        """Messages sent so far."""

    @property
    def announcements(self) -> int:
        """How many of them had to describe their structure."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensor data sent so far."""

    def post(self, peer: int, key: MessageKey) -> None:
        """Says that a receive is coming: asynchronous transports start it, others do nothing."""

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Hands a value over without waiting for the receive.

        The tensors in it must not be modified in place afterwards.

        Raises:
            BoundaryError: The value holds something that cannot cross; the message says where.
            PeerFailed: The peer is gone.
            PipelineTimeout: The peer has not taken earlier messages for the transport's limit.
        """

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) where the message has arrived, else (False, None), at once.

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
        """Waits until everything handed over has left this process.

        Raises:
            PipelineTimeout: Something is still here after ``timeout`` seconds.
        """

    def close(self) -> None:
        """Ends the connections; what was sent before is still delivered. May be repeated."""
