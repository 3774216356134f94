"""Sends and receives messages over Paddle's process groups, by one lane per direction and peer.

A message is a header on a stream (other connections of the two ranks), and one transfer for each of
its tensors: an ``isend`` or ``irecv`` of a process group. :class:`Outgoing` and :class:`Incoming`
are the two ends of a lane whose transfers return at once, as NCCL's do; the threaded ones run
transfers that block, as Gloo's do. See ``process_group.py``.
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
from fleetpipe.transport.sockets import CLOSING_SECONDS, interruption_error, message_timeout
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

#: The key of the headers, sent in the order of the messages: kind, source, target, channel and
#: micro-batch, then an announcement where the structure has changed. A header is a text, not a
#: tensor, which the sockets would move to the GPU.
HEADER = MessageKey("C", 0, 0, "process group header", 0)
#: The key of a receiver's answer that it is about to enter its transfers, where these block.
READY = MessageKey("C", 0, 0, "process group ready", 0)

#: Seconds between two looks at whether transfers are over.
_POLL_SECONDS = 0.0005


class Task(Protocol):
    """A transfer under way, as Paddle returns it."""

    def wait(self) -> object:
        """Makes later computations wait for the transfer; with Gloo, this call itself waits."""

    def is_completed(self) -> bool:
        """Returns whether the transfer is over."""


#: Starts to send a tensor, or to fill it with a received one.
Transfer = Callable[[Tensor], Task]


class Lane(NamedTuple):
    """One direction between two ranks: a stream for headers, a function that transfers tensors.

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
        """Ends a wait at the stream, if transfers block; any thread may call it."""
        if self.interrupt is not None:
            self.interrupt()


class Parcel(NamedTuple):
    """A message that is ready to be sent.

    Attributes:
        route: The message's key and ranks, for errors.
        header: The text to send under ``HEADER``.
        tensors: The contiguous tensors to transfer.
        timeout: Seconds that the peer may take to answer the header.
    """

    route: Route
    header: str
    tensors: list[Tensor]
    timeout: float


class Outgoing:
    """Sends messages to one peer by transfers that return at once, as NCCL's do."""

    _carriers = staticmethod(bridge.carriers)

    def __init__(self, rank: int, lane: Lane) -> None:
        """Sends on ``lane``, which leads from this rank, ``rank``, to its peer."""
        self._rank = rank
        self._lane = lane
        self._channels: dict[tuple[Any, ...], tuple[int, Structure]] = {}
        self._under_way: deque[tuple[Parcel, list[Task]]] = deque()
        self._interrupted = False

    def send(self, key: MessageKey, value: Value, timeout: float) -> tuple[int, bool]:
        """Starts to send a value.

        Args:
            key: The message's key.
            value: The value.
            timeout: Seconds that the peer may take to answer the header.

        Returns:
            The bytes of tensor data, and whether the structure had to be announced.

        Raises:
            BoundaryError: Something in the value cannot cross.
        """
        route = Route(key, self._rank, self._lane.peer)
        try:
            tree, tensors = take_apart(value)
        except Unfit as unfit:
            raise unfit.error(route) from None
        number, structure, announcement = self._structure_of(route, tree)
        header = f"{key.kind} {key.source} {key.target} {number} {key.micro_batch} {announcement}"
        self._start(Parcel(route, header, self._carriers(tensors), timeout))
        return structure.nbytes, bool(announcement)

    def flush(self, timeout: float) -> None:
        """Waits until the peer has received every message.

        It polls: waiting on one of NCCL's tasks would block the GPU's computation and not this
        process.

        Raises:
            PeerFailed: A rank of the job failed meanwhile.
            PipelineTimeout: Some message is still here after ``timeout`` seconds.
        """
        limit = Limit(timeout)
        self._lane.stream.flush(timeout)
        while not self._drop_sent():
            parcels = [parcel for parcel, _ in self._under_way]
            if self._interrupted:
                raise interruption_error(parcels[0].route)
            if limit.reached():
                raise self._send_timeout(parcels, timeout)
            time.sleep(_POLL_SECONDS)

    def interrupt(self) -> None:
        """Ends every wait of this lane; any thread may call it."""
        self._interrupted = True

    def close(self) -> None:
        """Closes the stream."""
        self._lane.stream.close()

    def _start(self, parcel: Parcel) -> None:
        """Starts the transfers of a message."""
        self._drop_sent()
        self._send_parcel(parcel)

    def _drop_sent(self) -> bool:
        """Drops the messages whose transfers are over; returns whether none remain."""
        while self._under_way and all(task.is_completed() for task in self._under_way[0][1]):
            self._under_way.popleft()
        return not self._under_way

    def _send_parcel(self, parcel: Parcel) -> None:
        """Sends the header of a message and starts the transfers of its tensors."""
        self._lane.stream.send(self._lane.peer, HEADER, parcel.header)
        if parcel.tensors:
            self._under_way.append((parcel, [self._lane.transfer(data) for data in parcel.tensors]))

    def _send_timeout(self, parcels: Sequence[Parcel], timeout: float) -> PipelineTimeout:
        """Returns the error that messages could not leave for ``timeout`` seconds."""
        peer = self._lane.peer
        return PipelineTimeout(
            f"rank {self._rank} could not send to rank {peer} for {timeout:g} s",
            where=str(parcels[0].route),
            got=f"{len(parcels)} messages wait for rank {peer}",
            cause=f"rank {peer} is stuck, stopped or much slower",
            fix="see where that rank is; raise the timeout if it only needs longer",
        )

    def _structure_of(self, route: Route, tree: Tree) -> tuple[int, Structure, str]:
        """Returns a channel's number, the value's structure, and an announcement of a changed one.

        Args:
            route: The message.
            tree: The structure of its value, as nested tuples.

        Returns:
            The number, the structure, and the announcement's text; "" if the peer knows the
            structure.
        """
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
    """Sends messages to one peer by transfers that block, on a thread of this lane.

    The thread starts a transfer only when the peer has answered that it is ready: Gloo ends every
    wait after 30 s, and a peer may compute, or be stopped, for longer.
    """

    _carriers = staticmethod(bridge.flat_bytes)

    def __init__(self, rank: int, lane: Lane) -> None:
        """Sends on ``lane``, which leads from ``rank`` to its peer, and starts the thread."""
        super().__init__(rank, lane)
        self._changed = threading.Condition()
        self._waiting: deque[Parcel] = deque()
        self._closing = False
        self._error: FleetPipeError | None = None
        name = f"fleetpipe-to-{lane.peer}"
        self._thread = threading.Thread(target=self._send_queue, name=name, daemon=True)
        self._thread.start()

    def flush(self, timeout: float) -> None:
        """Waits until the peer has received every message.

        Raises:
            PeerFailed: The peer is gone, or the transfer broke.
            PipelineTimeout: Some message is still here after ``timeout`` seconds.
        """
        limit = Limit(timeout)
        with self._changed:
            self._raise_failure()
            while self._waiting:
                if limit.reached():
                    raise self._send_timeout(self._waiting, timeout)
                self._changed.wait(limit.nap())
                self._raise_failure()

    def interrupt(self) -> None:
        """Ends every wait of this lane; any thread may call it."""
        self._lane.end_waits()
        with self._changed:
            route = Route(HEADER, self._rank, self._lane.peer)
            self._error = self._error or interruption_error(route)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread and closes the stream; messages that were not sent are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._lane.end_waits()
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._lane.stream.close()

    def _start(self, parcel: Parcel) -> None:
        """Hands a message to the thread."""
        with self._changed:
            self._raise_failure()
            self._waiting.append(parcel)
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        """Raises the error that ended the thread or interrupted the lane, if there is one."""
        if self._error is not None:
            raise self._error

    def _send_queue(self) -> None:
        """Sends the messages that :meth:`_start` queues, one after another, on the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                parcel = self._waiting[0]
            try:
                self._send_parcel(parcel)
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

    def _send_parcel(self, parcel: Parcel) -> None:
        """Sends the header of a message, waits for the answer, and transfers its tensors."""
        stream, peer = self._lane.stream, self._lane.peer
        stream.send(peer, HEADER, parcel.header)
        if parcel.tensors:
            stream.receive(peer, READY, parcel.timeout)
        for tensor in parcel.tensors:
            self._lane.transfer(tensor).wait()


def transfer_error(route: Route, peer: int, failure: Exception) -> FleetPipeError:
    """Returns the error to raise for a message that a lane's thread failed to send or receive.

    Args:
        route: The message.
        peer: The rank at the lane's other end.
        failure: What the thread raised.
    """
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
        structure: The structure of the message's value.
        buffers: The tensors that receive its data.
        tasks: The transfers under way; none if they are over.
    """

    structure: Structure
    buffers: list[Tensor]
    tasks: list[Task]


class Incoming:
    """Receives messages from one peer by transfers that return at once, as NCCL's do."""

    _tensors = staticmethod(bridge.reshape)

    def __init__(self, rank: int, lane: Lane) -> None:
        """Receives on ``lane``, which leads from the peer to this rank, ``rank``."""
        self._rank = rank
        self._lane = lane
        self._announced: dict[int, tuple[str, Structure]] = {}
        self._arrivals: dict[MessageKey, deque[Arrival]] = {}

    def start_arrived(self) -> None:
        """Starts the transfers of all messages whose headers have come."""
        arrived = True
        while arrived:
            arrived, header = self._lane.stream.try_receive(self._lane.peer, HEADER)
            if arrived:
                self._receive_data(header)

    def try_receive(self, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) if a message's data has come, else (False, None); never waits."""
        arrivals = self._arrivals.get(key)
        if not arrivals:
            self.start_arrived()
            arrivals = self._arrivals.get(key)
        if not arrivals or not all(task.is_completed() for task in arrivals[0].tasks):
            return False, None
        return True, self._take_value(key)

    def receive(self, key: MessageKey, timeout: float) -> Value:
        """Waits for a message's header, and makes later computations wait for its data.

        Raises:
            PipelineTimeout: The header did not come within ``timeout`` seconds.
        """
        limit = Limit(timeout)
        while key not in self._arrivals:
            seconds = limit.seconds_left()
            if seconds <= 0:
                raise message_timeout(Route(key, self._lane.peer, self._rank), timeout)
            try:
                self._receive_data(self._lane.stream.receive(self._lane.peer, HEADER, seconds))
            except PipelineTimeout:
                raise message_timeout(Route(key, self._lane.peer, self._rank), timeout) from None
        return self._take_value(key)

    def interrupt(self) -> None:
        """Does nothing: only the stream waits, and its own interrupt ends that."""

    def close(self) -> None:
        """Closes the stream."""
        self._lane.stream.close()

    def _receive_data(self, header: str) -> None:
        """Starts the transfers of the message that a header announces."""
        key, structure = self._parse_header(header)
        buffers = bridge.empty_like(structure.leaves)
        tasks = [self._lane.transfer(carrier) for carrier in bridge.carriers(buffers)]
        self._arrivals.setdefault(key, deque()).append(Arrival(structure, buffers, tasks))

    def _parse_header(self, header: str) -> tuple[MessageKey, Structure]:
        """Returns the key and the structure of the message that a header announces."""
        kind, *numbers, announcement = header.split(" ", 5)
        source, target, channel, micro_batch = map(int, numbers)
        if announcement:
            self._announced[channel] = decode(announcement.encode("ascii"))
        name, structure = self._announced[channel]
        return MessageKey(kind, source, target, name, micro_batch), structure

    def _take_value(self, key: MessageKey) -> Value:
        """Takes the oldest arrival of ``key``, which must be there, and returns its value."""
        arrivals = self._arrivals[key]
        arrival = arrivals.popleft()
        if not arrivals:
            del self._arrivals[key]
        for task in arrival.tasks:
            task.wait()
        structure = arrival.structure
        return structure.rebuild(self._tensors(arrival.buffers, structure.leaves))


class ThreadedIncoming(Incoming):
    """Receives messages from one peer by transfers that block, on a thread of this lane.

    The thread answers the header first, and only then the peer starts its half, so that Gloo's
    limit of 30 s is enough.
    """

    _tensors = staticmethod(bridge.from_bytes)

    def __init__(self, rank: int, lane: Lane) -> None:
        """Receives on ``lane``, which leads from its peer to ``rank``, and starts the thread."""
        super().__init__(rank, lane)
        self._changed = threading.Condition()
        self._interrupted = False
        self._error: FleetPipeError | None = None
        self._expected = HEADER
        name = f"fleetpipe-from-{lane.peer}"
        self._thread = threading.Thread(target=self._receive_all, name=name, daemon=True)
        self._thread.start()

    def start_arrived(self) -> None:
        """Does nothing: the thread receives by itself."""

    def try_receive(self, key: MessageKey) -> tuple[bool, Value]:
        """Returns (True, value) if a message has come, else (False, None); never waits."""
        with self._changed:
            if key in self._arrivals:
                return True, self._take_value(key)
            self._raise_failure(key)
            return False, None

    def receive(self, key: MessageKey, timeout: float) -> Value:
        """Waits until the thread has received a message; returns its value.

        Raises:
            PeerFailed: The peer is gone, or another rank died during the wait.
            PipelineTimeout: The message did not come within ``timeout`` seconds.
        """
        limit = Limit(timeout)
        with self._changed:
            while key not in self._arrivals:
                self._raise_failure(key)
                if limit.reached():
                    raise message_timeout(Route(key, self._lane.peer, self._rank), timeout)
                self._changed.wait(limit.nap())
            return self._take_value(key)

    def interrupt(self) -> None:
        """Ends every wait of this lane; any thread may call it."""
        self._lane.end_waits()
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread and closes the stream."""
        self.interrupt()
        self._thread.join(CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._lane.stream.close()

    def _raise_failure(self, key: MessageKey) -> None:
        """Raises an error for a receive of ``key`` if the thread failed or was interrupted."""
        if self._error is not None or self._interrupted:
            route = Route(key, self._lane.peer, self._rank)
            raise self._error or interruption_error(route)

    def _receive_all(self) -> None:
        """Receives one message after another, on the thread, until it is interrupted."""
        try:
            while not self._interrupted:
                self._receive_data(self._lane.stream.receive(self._lane.peer, HEADER, math.inf))
        except Exception as failure:
            route = Route(self._expected, self._lane.peer, self._rank)
            with self._changed:
                self._error = transfer_error(route, self._lane.peer, failure)
                self._changed.notify_all()

    def _receive_data(self, header: str) -> None:
        """Receives the data of the message that a header announces."""
        self._expected, structure = self._parse_header(header)
        buffers = bridge.byte_buffers(structure.leaves)
        if buffers:
            self._lane.stream.send(self._lane.peer, READY, None)
        for buffer in buffers:
            self._lane.transfer(buffer).wait()
        with self._changed:
            arrivals = self._arrivals.setdefault(self._expected, deque())
            arrivals.append(Arrival(structure, buffers, []))
            self._expected = HEADER
            self._changed.notify_all()
