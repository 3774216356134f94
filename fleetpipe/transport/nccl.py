"""Tensor data between GPUs over NCCL, everything else over the socket transport.

Each message is a small header on the sockets and, per tensor, one asynchronous ``isend`` that an
``irecv`` answers as soon as the header is read. Headers of one peer arrive in the order of its
sends, so both ends start their transfers in one order whatever the order of the receives, and with
a communicator for each direction neither end's sends stand in the way of its receives.

No machine with a GPU has run this module: its tests replace ``isend`` and ``irecv``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows
from fleetpipe.transport.base import Transport, Value
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.bridge import Tensor
from fleetpipe.transport.wire.message import MessageKey, Route, check_key
from fleetpipe.transport.wire.structure import NOTHING, Structure, Tree, decode, encode
from fleetpipe.transport.wire.value import Unfit, take_apart

# Under this key go, in the order of sends, the headers: kind, source, target, channel and
# micro-batch, then an announcement where the structure has changed. They are texts, not tensors,
# which the sockets would move to the GPU.
_HEADERS = MessageKey("C", 0, 0, "nccl", 0)


class Task(Protocol):
    """What Paddle returns for a transfer under way."""

    def wait(self) -> object:
        """Makes what is computed next wait for the transfer."""

    def is_completed(self) -> bool:
        """Tells whether the transfer is over."""


Transfer = Callable[[Tensor, int], Task]


class _Arrival(NamedTuple):
    """A message of which the header has come and the data is on its way."""

    structure: Structure
    tensors: list[Tensor]
    tasks: list[Task]


@shows("rank", "ranks")
class NcclTransport:
    """One rank's connections where tensors travel between GPUs; see :class:`base.Transport`.

    A wait for tensor data itself is not bounded here: a peer that dies between its header and its
    data ends the wait through NCCL's own watchdog.
    """

    def __init__(self, sockets: Transport, isend: Transfer, irecv: Transfer) -> None:
        """Puts tensor transfers beside a transport for headers.

        Args:
            sockets: Connections of the same rank, used by nothing else under the name "nccl".
            isend: Starts to send a contiguous tensor to a rank of the pipeline.
            irecv: Starts to fill a tensor from a rank of the pipeline.
        """
        self.rank = sockets.rank
        self.ranks = sockets.ranks
        self.messages = 0
        self.announcements = 0
        self.bytes_sent = 0
        self._sockets = sockets
        self._isend = isend
        self._irecv = irecv
        self._sent: dict[tuple[Any, ...], tuple[int, Structure]] = {}
        self._announced: dict[tuple[int, int], tuple[str, Structure]] = {}
        self._leaving: deque[tuple[Task, Tensor]] = deque()
        self._arrivals: dict[tuple[int, MessageKey], deque[_Arrival]] = {}

    def post(self, peer: int, key: MessageKey) -> None:
        """Starts the transfers of all messages of ``peer`` of which the headers have come."""
        arrived = True
        while arrived:
            arrived, header = self._sockets.try_receive(peer, _HEADERS)
            if arrived:
                self._begin(peer, header)

    def send(self, peer: int, key: MessageKey, value: Value) -> None:
        """Sends a header and starts the transfers; see :meth:`base.Transport.send`."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        try:
            tree, tensors = take_apart(value)
        except Unfit as unfit:
            raise unfit.error(Route(key, self.rank, peer)) from None
        number, structure, announcement = self._announce(peer, key, tree)
        header = f"{key.kind} {key.source} {key.target} {number} {key.micro_batch} {announcement}"
        self._sockets.send(peer, _HEADERS, header)
        for data in bridge.contiguous(tensors):
            if data.data_ptr():
                self._leaving.append((self._isend(data, peer), data))
        self.messages += 1
        self.bytes_sent += structure.nbytes

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Value]:
        """Takes a message whose data has come; see :meth:`base.Transport.try_receive`."""
        waiting = self._arrivals.get((peer, key))
        if not waiting:
            self.post(peer, key)
            waiting = self._arrivals.get((peer, key))
        if not waiting or not all(task.is_completed() for task in waiting[0].tasks):
            return False, None
        return True, self._take(peer, key)

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Value:
        """Waits for a message's header, and orders its data before what is computed next."""
        deadline = time.monotonic() + timeout
        while not self._arrivals.get((peer, key)):
            left = max(0.0, deadline - time.monotonic())
            self._begin(peer, self._sockets.receive(peer, _HEADERS, left))
        return self._take(peer, key)

    def flush(self, timeout: float) -> None:
        """Waits until all transfers that this rank started have ended."""
        self._sockets.flush(timeout)
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def close(self) -> None:
        """Ends the connections for headers; the communicators belong to Paddle's groups."""
        self._sockets.close()

    def _announce(self, peer: int, key: MessageKey, tree: Tree) -> tuple[int, Structure, str]:
        """Returns the channel's number and structure, and its announcement if it has changed."""
        channel = (peer, *key[:4])
        number, structure = self._sent.get(channel, (len(self._sent), NOTHING))
        if structure.tree == tree and channel in self._sent:
            return number, structure, ""
        check_key(key)
        structure = Structure(tree)
        text = encode(key.name, structure, Route(key, self.rank, peer)).decode("ascii")
        self._sent[channel] = (number, structure)
        self.announcements += 1
        return number, structure, text

    def _begin(self, peer: int, header: str) -> None:
        """Starts the transfers of the message that a header speaks of."""
        kind, *numbers, announcement = header.split(" ", 5)
        source, target, channel, micro_batch = map(int, numbers)
        if announcement:
            self._announced[peer, channel] = decode(announcement.encode("ascii"))
        name, structure = self._announced[peer, channel]
        tensors = bridge.empty(structure.leaves)
        tasks = [
            self._irecv(tensor, peer)
            for tensor, leaf in zip(tensors, structure.leaves)
            if leaf.nbytes
        ]
        key = MessageKey(kind, source, target, name, micro_batch)
        waiting = self._arrivals.setdefault((peer, key), deque())
        waiting.append(_Arrival(structure, tensors, tasks))

    def _take(self, peer: int, key: MessageKey) -> Value:
        waiting = self._arrivals[peer, key]
        arrival = waiting.popleft()
        if not waiting:
            del self._arrivals[peer, key]
        for task in arrival.tasks:
            task.wait()
        return arrival.structure.rebuild(arrival.tensors)


def transfers(rank: int, members: list[int]) -> tuple[Transfer, Transfer]:
    """Makes Paddle's asynchronous transfers for a pipeline. Collective over the whole job.

    Every process of the job calls it once for each pipeline of the job, in the same order, as
    ``paddle.distributed.new_group`` asks for.

    Args:
        rank: This process's rank in the pipeline, -1 in a process that is not part of it.
        members: The job's global ranks of the pipeline's ranks, in order.

    Returns:
        ``isend`` and ``irecv`` as :class:`NcclTransport` takes them.
    """
    ranks = range(len(members))
    groups = {
        (source, target): paddle.distributed.new_group([members[source], members[target]])
        for source in ranks
        for target in ranks
        if source != target
    }

    def isend(tensor: Tensor, peer: int) -> Task:
        return cast(Task, paddle.distributed.isend(tensor, members[peer], groups[rank, peer]))

    def irecv(tensor: Tensor, peer: int) -> Task:
        return cast(Task, paddle.distributed.irecv(tensor, members[peer], groups[peer, rank]))

    return isend, irecv
