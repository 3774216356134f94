"""One direction between two ranks: a stream for headers, and a transfer for tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from fleetpipe.transport.base import Transport
from fleetpipe.transport.wire.bridge import Tensor
from fleetpipe.transport.wire.message import MessageKey

#: Under this key go, in the order of sends, the headers: kind, source, target, channel and
#: micro-batch, then an announcement where the structure has changed. They are texts, not tensors,
#: which the sockets would move to the GPU.
HEADER = MessageKey("C", 0, 0, "process group header", 0)
#: The answer of a receiver whose transfers block: it is about to enter them.
READY = MessageKey("C", 0, 0, "process group ready", 0)


class Task(Protocol):
    """The handle that Paddle returns for a transfer."""

    def wait(self) -> object:
        """Orders the transfer before later computations."""

    def is_completed(self) -> bool:
        """Whether the transfer is over."""


Transfer = Callable[[Tensor], Task]


class Lane(NamedTuple):
    """The stream and the transfer function of one direction between two ranks.

    Attributes:
        peer: The other rank.
        stream: Connections of this rank that serve this direction only.
        transfer: Starts to send or to fill a contiguous tensor: bytes in one dimension for Gloo, a
            supported dtype for NCCL.
        interrupt: Ends a wait at ``stream`` from any thread. None if ``transfer`` returns at once,
            as NCCL's does; Gloo's returns when the other side has come.
    """

    peer: int
    stream: Transport
    transfer: Transfer
    interrupt: Callable[[], None] | None = None

    def end_waits(self) -> None:
        """Ends a wait at the stream, from any thread."""
        if self.interrupt is not None:
            self.interrupt()
