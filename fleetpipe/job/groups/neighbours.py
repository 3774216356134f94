"""Paddle's groups between neighbours of a pipeline, and the transport that uses them.

Neighbours are adjacent in the ring of a pipeline's ranks; stages send nearly everything to them.
The number of groups of all pairs would grow with the square of the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fleetpipe.aliases import PaddleGroup
from fleetpipe.errors import ConfigError
from fleetpipe.job import attempt_files, meeting
from fleetpipe.mesh.axes import Mesh
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.gloo.process_groups import has_gloo, transfers
from fleetpipe.paddle_api.topology import meets_by_host
from fleetpipe.transport import SocketTransport, Store, View
from fleetpipe.transport.base import PROCESS_GROUP, SOCKETS
from fleetpipe.transport.joining.connections import Joined, join

if TYPE_CHECKING:  # few jobs load it
    from fleetpipe.transport import ProcessGroupTransport
    from fleetpipe.transport.process_group.lane import Lane

_POLL_SECONDS = 0.001


class Direction(NamedTuple):
    """A direction in which one rank of a pipeline sends to another."""

    source: int
    target: int


def default_transport() -> str:
    """Returns the default transport of a job's pipelines, which depends on the device."""
    return SOCKETS if meets_by_host() else PROCESS_GROUP


def refuse_without_gloo(transport: str) -> None:
    """Refuses process groups on a system whose Paddle has none that can send."""
    if transport == PROCESS_GROUP and device_kind() != "cpu" and meets_by_host():
        raise ConfigError(
            "ranks that share a card have no process groups that send",
            cause="NCCL refuses two ranks on one card, and Gloo sends nothing that lies in one",
            fix="leave fleetpipe_configs['transport'] out, or 'sockets'; where each rank has a "
            "card of its own, unset PADDLE_DISTRI_BACKEND",
        )
    usable = has_gloo() and paddle.version.major != "2"
    if transport == PROCESS_GROUP and device_kind() == "cpu" and not usable:
        raise ConfigError(
            "this Paddle has no process groups that send on a CPU",
            cause="its wheel is built without Gloo, as those for macOS are; or it is 2.6.2, on "
            "which threads that receive tensors hang",
            fix="leave fleetpipe_configs['transport'] and FLEETPIPE_TRANSPORT out, or 'sockets'",
        )


def directions(ranks: int) -> list[Direction]:
    """Returns every direction between two neighbours of a pipeline."""
    steps = {1 % ranks, -1 % ranks} - {0}
    return [Direction(rank, (rank + step) % ranks) for rank in range(ranks) for step in steps]


def make_groups(mesh: Mesh) -> dict[Direction, PaddleGroup]:
    """Creates one of Paddle's groups for each direction between neighbours.

    Collective over the job.

    Returns:
        The groups of this process's pipeline.
    """
    mine: dict[Direction, PaddleGroup] = {}
    for members in mesh.groups(["pp"]):
        for direction in directions(len(members)):
            group = paddle.distributed.new_group(ranks=[members[rank] for rank in direction])
            if meeting.own_rank() in members:
                mine[direction] = group
    return mine


def connect(
    connections: SocketTransport,
    members: Sequence[int],
    groups: Mapping[Direction, PaddleGroup],
    store: Store,
    namespace: str,
    timeout: float,
) -> ProcessGroupTransport:
    """Creates the transport of a pipeline over Paddle's groups. Collective over the pipeline.

    Args:
        connections: This process's connections to all ranks of the job.
        members: The pipeline's ranks in the job, in order.
        groups: The groups of :func:`make_groups`, in their order.
        store: The job's store.
        namespace: Prefix of its keys there, new for each job.
        timeout: Seconds that any wait for another rank may last.
    """
    from fleetpipe.transport import ProcessGroupTransport

    view = View(connections, members)
    outgoing, incoming = lanes(view, groups, store, namespace, timeout)
    return ProcessGroupTransport(view, outgoing, incoming, timeout)


def lanes(
    view: View,
    groups: Mapping[Direction, PaddleGroup],
    store: Store,
    namespace: str,
    timeout: float,
) -> tuple[dict[int, Lane], dict[int, Lane]]:
    """Connects this rank's directions to its neighbours. Collective over the pipeline.

    ``view`` has its connections to the ranks of the pipeline; the rest is as for :func:`connect`.

    Returns:
        Those in which it sends, and those in which it receives, by neighbour.
    """
    from fleetpipe.transport.process_group.lane import Lane

    streams: list[Joined] = []
    if device_kind() == "cpu":
        streams = join(
            rank=view.rank,
            ranks=view.ranks,
            store=store,
            namespace=f"{namespace}/{view.members[0]}",
            timeout=timeout,
            streams=2,
            attempt=attempt_files.number(),
        )

    def lane(direction: Direction) -> Lane:
        sends = direction.source == view.rank
        peer = direction.target if sends else direction.source
        isend, irecv = transfers(groups[direction], view.members[peer])
        transfer = isend if sends else irecv
        if not streams:
            return Lane(peer, view, transfer)
        stream = streams[direction.source > direction.target]
        seals = {peer: stream.seals[peer]} if stream.seals else None
        sockets = {peer: stream.sockets.pop(peer)}
        only = SocketTransport(view.rank, view.ranks, sockets, timeout=timeout, seals=seals)
        return Lane(peer, only, transfer, only.interrupt)

    all_lanes = {direction: lane(direction) for direction in groups if view.rank in direction}
    for sock in (sock for stream in streams for sock in stream.sockets.values()):
        sock.close()
    if not streams:
        _warm_up(all_lanes.values())
    outgoing = {d.target: lane for d, lane in all_lanes.items() if d.source == view.rank}
    incoming = {d.source: lane for d, lane in all_lanes.items() if d.target == view.rank}
    return outgoing, incoming


def _warm_up(lanes: Iterable[Lane]) -> None:
    """Makes Paddle create the communicator of each lane, in an order common to all ranks.

    Paddle creates it at the first transfer, in which both ranks wait for each other. Within a
    batch, ranks that all send first would wait for ever, and so would one whose card has a large
    transfer under way.
    """
    for lane in lanes:
        sent = paddle.zeros([1])
        task = lane.transfer(sent)
        while not task.is_completed():
            time.sleep(_POLL_SECONDS)
