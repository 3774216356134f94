"""Lanes of Paddle's process groups: one for each direction between a rank and a peer.

A message is a header on a stream, and a transfer for each of its tensors: an ``isend`` or ``irecv``
of a process group.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fleetpipe.errors import FleetPipeError, PeerFailed, PipelineTimeout
from fleetpipe.transport.base import Limit, Transport, Value
from fleetpipe.transport.sockets import CLOSING_SECONDS, interruption, late_message
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.bridge import Tensor, Unfit, take_apart
from fleetpipe.transport.wire.structure import (
    NOTHING,
    MessageKey,
    Route,
    Structure,
    Tree,
    check_key,
    decode,
    encode,
)

#: Under this key go, in the order of sends, the headers: kind, source, target, channel and
#: micro-batch, then an announcement where the structure has changed. They are texts, not tensors,
#: which the sockets would move to the GPU.
HEADER = MessageKey("C", 0, 0, "process group header", 0)
#: The answer of a receiver whose transfers block: it is about to enter them.
READY = MessageKey("C", 0, 0, "process group ready", 0)

_POLL_SECONDS = 0.0005


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
            as NCCL's does; Gloo's returns when the peer has called its transfer too.
    """

    peer: int
    stream: Transport
    transfer: Transfer
    interrupt: Callable[[], None] | None = None

    def end_waits(self) -> None:
        """Ends a wait at the stream, from any thread."""
        if self.interrupt is not None:
            self.interrupt()


class Parcel(NamedTuple):
    """A message that is ready to leave."""

    route: Route
    header: str
    tensors: list[Tensor]
    timeout: float


class Outgoing:
    """Messages to one peer over transfers that return at once, as NCCL's do."""

    _carriers = staticmethod(bridge.carriers)

    def __init__(self, rank: int, lane: Lane) -> None:
        """Sends on ``lane``, which leads from this rank, ``rank``, to its peer."""
        self._rank = rank
        self._lane = lane
        self._channels: dict[tuple[Any, ...], tuple[int, Structure]] = {}
        self._leaving: deque[tuple[Parcel, list[Task]]] = deque()
        self._interrupted = False

    def send(self, key: MessageKey, value: Value, timeout: float) -> tuple[int, bool]:
        """Starts to send a value.

        Returns:
            The bytes of tensor data, and whether the structure had to be announced.
        """
        route = Route(key, self._rank, self._lane.peer)
        try:
            tree, tensors = take_apart(value)
        except Unfit as unfit:
            raise unfit.error(route) from None
        number, structure, announcement = self._announce(route, tree)
        header = f"{key.kind} {key.source} {key.target} {number} {key.micro_batch} {announcement}"
        self._put(Parcel(route, header, self._carriers(tensors), timeout))
        return structure.nbytes, bool(announcement)

    def flush(self, timeout: float) -> None:
        """Waits until the peer has everything.

        It polls: waiting on one of NCCL's tasks would block the GPU's computation and not this
        process.

        Raises:
            PeerFailed: A rank of the job failed meanwhile.
            PipelineTimeout: Something is still here after ``timeout`` seconds.
        """
        limit = Limit(timeout)
        self._lane.stream.flush(timeout)
        while not self._all_gone():
            parcels = [parcel for parcel, _ in self._leaving]
            if self._interrupted:
                raise interruption(parcels[0].route)
            if limit.reached():
                raise self._late(parcels, timeout)
            time.sleep(_POLL_SECONDS)

    def interrupt(self) -> None:
        """Ends every wait, from any thread."""
        self._interrupted = True

    def close(self) -> None:
        """Ends the stream."""
        self._lane.stream.close()

    def _put(self, parcel: Parcel) -> None:
        self._all_gone()
        self._transfer(parcel)

    def _all_gone(self) -> bool:
        """Drops the messages that have left; returns whether none remain."""
        while self._leaving and all(task.is_completed() for task in self._leaving[0][1]):
            self._leaving.popleft()
        return not self._leaving

    def _transfer(self, parcel: Parcel) -> None:
        self._lane.stream.send(self._lane.peer, HEADER, parcel.header)
        if parcel.tensors:
            self._leaving.append((parcel, [self._lane.transfer(data) for data in parcel.tensors]))

    def _late(self, parcels: Sequence[Parcel], timeout: float) -> PipelineTimeout:
        peer = self._lane.peer
        return PipelineTimeout(
            f"rank {self._rank} could not send to rank {peer} for {timeout:g} s",
            where=str(parcels[0].route),
            got=f"{len(parcels)} messages wait for rank {peer}",
            cause=f"rank {peer} is stuck, stopped or much slower",
            fix="see where that rank is; raise the timeout if it only needs longer",
        )

    def _announce(self, route: Route, tree: Tree) -> tuple[int, Structure, str]:
        """Returns the channel's number and structure, and an announcement if it has changed."""
        channel = route.key[:4]
        number, structure = self._channels.get(channel, (len(self._channels), NOTHING))
        if structure.tree == tree and channel in self._channels:
            return number, structure, ""
        check_key(route.key)
        structure = Structure(tree)
        text = encode(route.key.name, structure, route).decode("ascii")
        self._channels[channel] = (number, structure)
        return number, structure, text


class ThreadedOutgoing(Outgoing):
    """Messages to one peer over transfers that block, each run by a thread.

    The thread starts a transfer only when the peer has answered that it is ready: Gloo ends every
    wait after 30 s, and a peer may compute, or be stopped, for longer.
    """

    _carriers = staticmethod(bridge.flat_bytes)

    def __init__(self, rank: int, lane: Lane) -> None:
        super().__init__(rank, lane)
        self._changed = threading.Condition()
        self._waiting: deque[Parcel] = deque()
        self._closing = False
        self._error: FleetPipeError | None = None
        name = f"fleetpipe-to-{lane.peer}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def flush(self, timeout: float) -> None:
        """Waits until the peer has everything.

        Raises:
            PeerFailed: The peer is gone, or the transfer broke.
            PipelineTimeout: Something is still here after ``timeout`` seconds.
        """
        limit = Limit(timeout)
        with self._changed:
            self._raise_failure()
            while self._waiting:
                if limit.reached():
                    raise self._late(self._waiting, timeout)
                self._changed.wait(limit.nap())
                self._raise_failure()

    def interrupt(self) -> None:
        """Ends every wait, from any thread."""
        self._lane.end_waits()
        with self._changed:
            self._error = self._error or interruption(Route(HEADER, self._rank, self._lane.peer))
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread and the stream; messages that have not left are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._lane.end_waits()
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._lane.stream.close()

    def _put(self, parcel: Parcel) -> None:
        with self._changed:
            self._raise_failure()
            self._waiting.append(parcel)
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                parcel = self._waiting[0]
            try:
                self._transfer(parcel)
                error = None
            except Exception as failure:
                error = transfer_error(parcel.route, self._lane.peer, failure)
            with self._changed:
                self._error = self._error or error
                self._waiting.popleft()
                self._changed.notify_all()
                if error is not None:
                    return
            del parcel  # or its tensors would live until the next one

    def _transfer(self, parcel: Parcel) -> None:
        stream, peer = self._lane.stream, self._lane.peer
        stream.send(peer, HEADER, parcel.header)
        if parcel.tensors:
            stream.receive(peer, READY, parcel.timeout)
        for tensor in parcel.tensors:
            self._lane.transfer(tensor).wait()


def transfer_error(route: Route, peer: int, failure: Exception) -> FleetPipeError:
    """Returns the error of a message that a thread failed to send or receive."""
    if isinstance(failure, FleetPipeError):
        if route.key != HEADER:
            failure.add_place(str(route))
        return failure
    return PeerFailed(
        f"the transfer between this rank and rank {peer} broke",
        where=str(route),
        got=str(failure).strip().splitlines()[-1],
        cause=f"rank {peer} died, or was stopped for 30 s in the midst of a transfer, which Gloo "
        "does not outlast",
        fix=f"read the log of rank {peer}; use fleetpipe_configs = {{'transport': 'sockets'}} "
        "where ranks are stopped",
    )


class Arrival(NamedTuple):
    """A message whose header has come, and whose data has come or is under way.

    Attributes:
        structure: The message's structure.
        places: The buffers that receive its data.
        tasks: The transfers under way.
    """

    structure: Structure
    places: list[Tensor]
    tasks: list[Task]


class Incoming:
    """Messages from one peer over transfers that return at once, as NCCL's do."""

    _tensors = staticmethod(bridge.reshape)

    def __init__(self, rank: int, lane: Lane) -> None:
        """Receives on ``lane``, which leads from the peer to this rank, ``rank``."""
        self._rank = rank
        self._lane = lane
        self._announced: dict[int, tuple[str, Structure]] = {}
        self._arrivals: dict[MessageKey, deque[Arrival]] = {}

    def begin(self) -> None:
        """Starts the transfers of all messages whose headers have come."""
        arrived = True
        while arrived:
            arrived, header = self._lane.stream.try_receive(self._lane.peer, HEADER)
            if arrived:
                self._accept(header)

    def try_receive(self, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) if the message's data has come, else (False, None)."""
        waiting = self._arrivals.get(key)
        if not waiting:
            self.begin()
            waiting = self._arrivals.get(key)
        if not waiting or not all(task.is_completed() for task in waiting[0].tasks):
            return False, None
        return True, self._take(key)

    def receive(self, key: MessageKey, timeout: float) -> Value:
        """Waits for a message's header, and orders its data before later computations."""
        limit = Limit(timeout)
        while key not in self._arrivals:
            left = limit.seconds_left()
            if left <= 0:
                raise self._late(key, timeout)
            try:
                self._accept(self._lane.stream.receive(self._lane.peer, HEADER, left))
            except PipelineTimeout:
                raise self._late(key, timeout) from None
        return self._take(key)

    def interrupt(self) -> None:
        """Ends every wait, from any thread; this class waits for nothing of its own."""

    def close(self) -> None:
        """Ends the stream."""
        self._lane.stream.close()

    def _accept(self, header: str) -> None:
        """Starts the transfers of the message that a header announces."""
        key, structure = self._read(header)
        places = bridge.empty_like(structure.leaves)
        tasks = [self._lane.transfer(carrier) for carrier in bridge.carriers(places)]
        self._arrivals.setdefault(key, deque()).append(Arrival(structure, places, tasks))

    def _read(self, header: str) -> tuple[MessageKey, Structure]:
        kind, *numbers, announcement = header.split(" ", 5)
        source, target, channel, micro_batch = map(int, numbers)
        if announcement:
            self._announced[channel] = decode(announcement.encode("ascii"))
        name, structure = self._announced[channel]
        return MessageKey(kind, source, target, name, micro_batch), structure

    def _take(self, key: MessageKey) -> Value:
        waiting = self._arrivals[key]
        arrival = waiting.popleft()
        if not waiting:
            del self._arrivals[key]
        for task in arrival.tasks:
            task.wait()
        structure = arrival.structure
        return structure.rebuild(self._tensors(arrival.places, structure.leaves))

    def _late(self, key: MessageKey, timeout: float) -> PipelineTimeout:
        return late_message(Route(key, self._lane.peer, self._rank), timeout)


class ThreadedIncoming(Incoming):
    """Messages from one peer over transfers that block, each run by a thread.

    The thread answers the header first, and only then the peer starts its half, so that Gloo's
    limit of 30 s is enough.
    """

    _tensors = staticmethod(bridge.from_bytes)

    def __init__(self, rank: int, lane: Lane) -> None:
        super().__init__(rank, lane)
        self._changed = threading.Condition()
        self._interrupted = False
        self._error: FleetPipeError | None = None
        self._expected = HEADER
        name = f"fleetpipe-from-{lane.peer}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Does nothing: the thread receives by itself."""

    def try_receive(self, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) if the message has come, else (False, None)."""
        with self._changed:
            if key in self._arrivals:
                return True, self._take(key)
            self._raise_failure(key)
            return False, None

    def receive(self, key: MessageKey, timeout: float) -> Value:
        """Waits for a message."""
        limit = Limit(timeout)
        with self._changed:
            while key not in self._arrivals:
                self._raise_failure(key)
                if limit.reached():
                    raise self._late(key, timeout)
                self._changed.wait(limit.nap())
            return self._take(key)

    def interrupt(self) -> None:
        """Ends every wait, from any thread."""
        self._lane.end_waits()
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread and the stream."""
        self.interrupt()
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._lane.stream.close()

    def _raise_failure(self, key: MessageKey) -> None:
        if self._error is not None or self._interrupted:
            route = Route(key, self._lane.peer, self._rank)
            raise self._error or interruption(route)

    def _run(self) -> None:
        try:
            while not self._interrupted:
                self._accept(self._lane.stream.receive(self._lane.peer, HEADER, math.inf))
        except Exception as failure:
            route = Route(self._expected, self._lane.peer, self._rank)
            with self._changed:
                self._error = transfer_error(route, self._lane.peer, failure)
                self._changed.notify_all()

    def _accept(self, header: str) -> None:
        """Receives the message that a header announces."""
        self._expected, structure = self._read(header)
        buffers = bridge.byte_buffers(structure.leaves)
        if buffers:
            self._lane.stream.send(self._lane.peer, READY, None)
        for buffer in buffers:
            self._lane.transfer(buffer).wait()
        with self._changed:
            waiting = self._arrivals.setdefault(self._expected, deque())
            waiting.append(Arrival(structure, buffers, []))
            self._expected = HEADER
            self._changed.notify_all()
