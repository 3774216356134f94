"""Receives from one peer: a header on a stream, then each tensor by ``irecv``."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import NamedTuple

from fleetpipe.errors import FleetPipeError, PipelineTimeout
from fleetpipe.transport.base import Value
from fleetpipe.transport.limit import Limit
from fleetpipe.transport.process_group.lane import HEADER, READY, Lane, Task
from fleetpipe.transport.process_group.outgoing import transfer_error
from fleetpipe.transport.sockets.transport import CLOSING_SECONDS, interruption
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.bridge import Tensor
from fleetpipe.transport.wire.message import MessageKey, Route, describe
from fleetpipe.transport.wire.structure import Structure, decode


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
            left = limit.left()
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
        peer = self._lane.peer
        return PipelineTimeout(
            f"rank {self._rank} waited {timeout:g} s for a message of rank {peer}",
            where=str(Route(key, peer, self._rank)),
            expected=f"{describe(key)} to arrive",
            cause=f"rank {peer} is computing, is stuck or stopped, or follows another schedule",
            fix=f"see where rank {peer} is; raise the timeout if it only needs longer",
        )


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
