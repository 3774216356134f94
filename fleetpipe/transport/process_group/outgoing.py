"""Sends to one peer: a header on a stream, then each tensor by ``isend``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from fleetpipe.errors import FleetPipeError, PeerFailed, PipelineTimeout
from fleetpipe.transport.base import Value
from fleetpipe.transport.limit import Limit
from fleetpipe.transport.process_group.lane import HEADER, READY, Lane, Task
from fleetpipe.transport.sockets.transport import CLOSING_SECONDS, interruption
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.bridge import Tensor
from fleetpipe.transport.wire.message import MessageKey, Route, check_key
from fleetpipe.transport.wire.structure import NOTHING, Structure, Tree, encode
from fleetpipe.transport.wire.value import Unfit, take_apart

_POLL_SECONDS = 0.0005


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
