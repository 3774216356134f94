"""Creates Paddle's groups within the user's time limit and reuses them in later jobs.

Paddle cannot close a group: its descriptors and threads stay until its process ends. So a job
reuses the groups with its members that earlier jobs created. All ranks create the same groups in
the same order, so a group that one rank has, all its members have; the groups of a failed job are
not used again. A group keeps the options that it was first created with, those of NCCL for example.

Each Gloo group gets a key-value store of its own. In the job's store all groups would write their
addresses under the same keys (2.6.2 and 3.3.1): a rank that creates its second group a moment
before another rank reads the address of that rank's first group, which no longer listens:
"Connection refused", about once in five starts of three ranks. The ranks also meet, so that none
enters Gloo, which gives up after 30 s, before the others have come. Gloo listens at the address
that the host's name has, which on many hosts is a loopback one, unless it is told an interface.

The groups that a transport sends by are those of neighbours, ranks that are adjacent in the ring of
a pipeline; stages send nearly everything to them. The number of groups of all pairs would grow with
the square of the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetpipe import log
from fleetpipe.aliases import PaddleGroup
from fleetpipe.errors import (
    ConfigError,
    FleetPipeError,
    PeerFailed,
    PipelineTimeout,
    TransportError,
)
from fleetpipe.job import attempt_files, exchanges, meeting
from fleetpipe.job.exchanges import OwnGroup
from fleetpipe.job.meeting import JobStore
from fleetpipe.job.watch import Watch
from fleetpipe.mesh.axes import Mesh
from fleetpipe.paddle_api import distributed, paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.distributed import (
    communicates_over_host,
    has_gloo,
    isend_and_irecv,
    open_tcp_store,
    replacing_store_and_groups,
)
from fleetpipe.transport import SocketTransport, Store, View, hosts
from fleetpipe.transport.base import PROCESS_GROUP, SOCKETS, Limit, await_keys
from fleetpipe.transport.peer_connections import Joined, join

if TYPE_CHECKING:
    from fleetpipe.transport import ProcessGroupTransport
    from fleetpipe.transport.lanes import Lane


#: By members (ranks of the job), Paddle's groups of them, in the order in which a job creates them.
_kept: dict[tuple[int, ...], list[Any]] = {}
#: Whether some rank may hang in an operation of a group, or may not have created it.
_in_doubt = False

#: Where the files of Paddle's and Gloo's C++ are, which their errors name.
_SOURCES = "/paddle/"
#: Paddle's message about a library of NVIDIA's that it cannot open at its first use, and why.
_LIBRARY = re.compile(r"dynamic library \((\S+)\).*\(error code is [^:]*: (.*)\)")

_log = log.logger(__name__)

#: Below the ports that the system gives to outgoing connections: none of those is in the way.
_PORTS = range(20000, 32000)

#: Seconds between two looks at whether a transfer is over.
_POLL_SECONDS = 0.001


@contextmanager
def creating_groups(number: int, store: JobStore, watch: Watch, timeout: float) -> Iterator[None]:
    """Lets Paddle's ``fleet.init`` create the groups of a job within the context. Collective.

    Args:
        number: Number of earlier jobs of these processes; it makes keys unique.
        store: The job's store.
        watch: The watch over the other ranks.
        timeout: Seconds that any wait for another rank may last.

    Raises:
        PeerFailed: Paddle could not create the groups.
        PipelineTimeout: Some rank did not come to a group that it is a member of.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    all_ranks = range(meeting.world_size())
    separate_stores(store, timeout)
    limited = watch.limit(timeout, "making Paddle's groups", all_ranks)
    open_store = functools.partial(meeting.paddles_client, timeout)

    def new_group(make: Callable[..., Any], ranks: list[int], **options: Any) -> Any:
        """Returns an earlier job's group of these members, or the one that ``make`` creates."""
        members = tuple(sorted(ranks))
        counts[members] += 1
        groups = _kept.setdefault(members, [])
        if counts[members] > len(groups):
            takes_part = meeting.own_rank() in members and len(members) > 1
            what = f"making Paddle's group of ranks {list(members)}"
            if takes_part:
                key = f"fleetpipe/{number}/group/{members}/{counts[members]}"
                # Whoever waits there says itself who is missing, before the watch would.
                with watch.limit(2 * timeout, what, members):
                    meeting.meet(store, key, timeout, what, watch.gone, members)
            with watch.limit(timeout, what, members if takes_part else all_ranks):
                groups.append(make(ranks, **options))
        return groups[counts[members] - 1]

    with limited, translating_errors(), replacing_store_and_groups(open_store, new_group):
        yield
    # The first rank of a group serves its store: it must not leave while others make it.
    meeting.meet(store, f"fleetpipe/{number}/groups", timeout)
    meeting.wait_for_store_users(store, f"fleetpipe/{number}/groups/going")


def drop_doubtful_groups(number: int, store: JobStore, meet: Callable[[], None]) -> None:
    """Drops the groups of earlier jobs if, on any rank, one of these failed. Collective.

    The groups that this job creates count as doubtful until :func:`mark_reusable`.

    Args:
        number: Number of earlier jobs of these processes.
        store: The job's store.
        meet: Waits until all ranks are there.
    """
    global _in_doubt
    key = f"fleetpipe/{number}/groups/in_doubt"
    if _in_doubt:
        store.add(key, 1)
    meet()
    if store.add(key, 0):
        _kept.clear()
    _in_doubt = True


def mark_reusable(ended_well: bool) -> None:
    """Notes at the end of a job that later jobs may use its groups, if the job ended well."""
    global _in_doubt
    _in_doubt = not ended_well


@contextmanager
def translating_errors() -> Iterator[None]:
    """Turns errors of Gloo and of Paddle's store into errors that say what happened."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if _SOURCES not in str(error) or isinstance(error, FleetPipeError):
            raise
        if missing := _LIBRARY.search(str(error)):
            raise TransportError(
                f"Paddle cannot load {missing[1]}, by which GPUs send: {missing[2]}",
                fix="install it for the CUDA that this wheel is built for, under this very name, "
                "in a folder of LD_LIBRARY_PATH; or have all ranks meet through the host's memory: "
                "PADDLE_DISTRI_BACKEND=gloo",
            ) from error
        raise PeerFailed(
            "Paddle could not make its groups",
            got=str(error).strip().splitlines()[-1],
            cause="another rank died meanwhile, the ranks cannot reach each other, or two of them "
            "use one GPU, which NCCL refuses",
            fix="read the logs of the other ranks; with one GPU, run one process, or set "
            "PADDLE_DISTRI_BACKEND=gloo",
        ) from error


def separate_stores(store: Store, timeout: float) -> None:
    """Gives every Gloo group a store of its own, until :func:`share_store_again`.

    If the user chose no interface for Gloo, it sets the one that leads to the other ranks.

    Args:
        store: The job's store, through which a group's ranks find the group's store.
        timeout: Seconds that the ranks of a group may take to arrive.
    """
    distributed.replace_gloo_stores(_make_store_opener(store, "fleetpipe/gloo", timeout))
    _complete_gloo(timeout)


def make_unconnected(timeout: float) -> None:
    """Makes Paddle create groups without connections, until :func:`connect_members`."""
    distributed.replace_gloo_stores(None)
    _complete_gloo(timeout)


def connect_members(store: Store, prefix: str, time: int, timeout: float) -> None:
    """Connects again the groups that this process has created. Collective over the job.

    Args:
        store: The job's store.
        prefix: A prefix of keys there that was not used before.
        time: How often groups have been connected again, this time included.
        timeout: Seconds that the ranks of a group may take to arrive.
    """
    global _in_doubt
    # A later job's ranks differ in what they have made.
    _in_doubt = True
    with translating_errors():
        distributed.connect_groups(_make_store_opener(store, f"{prefix}/gloo", timeout), time)
    distributed.replace_gloo_stores(_make_store_opener(store, f"{prefix}/later", timeout))


def _make_store_opener(store: Store, prefix: str, timeout: float) -> Callable[[int, int, int], Any]:
    """Returns a function that opens one Gloo group's store; its members call it together.

    Args:
        store: The job's store.
        prefix: Prefix of the group's keys there, new for each use.
        timeout: Seconds that the ranks of a group may take to arrive.
    """
    _choose_interface()

    def open_store(rank: int, ranks: int, group: int) -> Any:
        """Opens the store of group number ``group``, as its member ``rank`` of ``ranks``."""
        key = f"{prefix}/{group}"
        opened = _open_group_store(store, key, rank, group, timeout)
        # They meet at the job's store, whose waits end when a rank fails.
        keys = {member: f"{key}/here/{member}" for member in range(ranks)}
        store.add(keys[rank], 1)
        _await_members(store, group, keys, timeout)
        return opened

    return open_store


def _complete_gloo(timeout: float) -> None:
    """Gives Paddle's groups the operations that Gloo lacks, and a substitute for Gloo itself."""
    distributed.replace_gloo_methods(exchanges.methods())
    distributed.replace_missing_gloo(functools.partial(OwnGroup, timeout=timeout))


def share_store_again() -> None:
    """Lets later Gloo groups use Paddle's store again: undoes :func:`separate_stores`."""
    distributed.restore_gloo_stores()


def _open_group_store(store: Store, key: str, rank: int, group: int, timeout: float) -> Any:
    """Opens a group's store: its first member serves it, the others find it in the job's store.

    Args:
        store: The job's store.
        key: The group's prefix of keys there.
        rank: This process's number in the group.
        group: The group's number, for messages.
        timeout: Seconds that the members may take.
    """
    if rank == 0:
        host = hosts.gloo_interface()[1] or hosts.own_address()
        port = _free_port(host)
    else:
        _await_members(store, group, {0: f"{key}/published"}, timeout)
        host, _, text = store.get(f"{key}/address").decode().rpartition(":")
        port = int(text)
    opened = open_tcp_store(host, port, rank == 0, timeout)
    if rank == 0:
        store.set(f"{key}/address", f"{host}:{port}")
        store.add(f"{key}/published", 1)
    return opened


def _choose_interface() -> None:
    """Sets the network interface that Gloo uses, unless the user has chosen one."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name, address = hosts.gloo_interface()
    if not name:
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    named = hosts.named_address()
    if address not in ("127.0.0.1", named):
        log.once(
            _log.info,
            f"Gloo uses the interface {name} ({address}), which leads to the other hosts; "
            f"this host's name leads to {named or 'no address'}",
            any_rank=True,
        )


def _await_members(store: Store, group: int, keys: Mapping[int, str], timeout: float) -> None:
    """Waits until members of a group have added to their counters in the job's store.

    Args:
        store: The job's store.
        group: The group's number, for messages.
        keys: By member, the key of its counter.
        timeout: Seconds to wait.
    """

    def failure(missing: list[int], _: object) -> PipelineTimeout:
        """Returns the error for the members that did not come."""
        who = f"members {missing}" if missing[1:] else f"member {missing[0]}"
        return PipelineTimeout(
            f"{who} of Paddle's group {group} did not make it within {timeout:g} s",
            fix="see their logs; raise fleetpipe_configs['timeout'] if they are only slow",
        )

    for _ in await_keys(store, keys, Limit(timeout), failure):
        pass


def _free_port(host: str) -> int:
    """Returns a port of ``_PORTS`` on which nothing listens at ``host``."""
    for port in random.Random().sample(_PORTS, 100):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise TransportError(
        f"no port between {_PORTS.start} and {_PORTS.stop} is free on {host}",
        fix="end left-over programs that hold these ports, and launch again",
    )


class Direction(NamedTuple):
    """The ranks of a pipeline between which messages go: from ``source`` to ``target``."""

    source: int
    target: int


def default_transport() -> str:
    """Returns the transport of a job's pipelines that suits its devices."""
    return SOCKETS if communicates_over_host() else PROCESS_GROUP


def refuse_without_gloo(transport: str) -> None:
    """Refuses the transport "process_group" where Paddle has no process groups that send."""
    if transport == PROCESS_GROUP and device_kind() != "cpu" and communicates_over_host():
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
    """Creates one of Paddle's groups for each direction between neighbours of a pipeline.

    Collective over the job.

    Returns:
        The groups of this process's pipeline.
    """
    groups: dict[Direction, PaddleGroup] = {}
    for members in mesh.groups(["pp"]):
        for direction in directions(len(members)):
            group = paddle.distributed.new_group(ranks=[members[rank] for rank in direction])
            if meeting.own_rank() in members:
                groups[direction] = group
    return groups


def connect_neighbours(
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
    """Connects this rank to its neighbours by lanes. Collective over the pipeline.

    Args:
        view: This rank's connections to the ranks of the pipeline.
        groups: The groups of :func:`make_groups`, in their order.
        store: The job's store.
        namespace: Prefix of its keys there, new for each job.
        timeout: Seconds that any wait for another rank may last.

    Returns:
        The lanes by which it sends, and those by which it receives, by neighbour.
    """
    from fleetpipe.transport.lanes import Lane

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

    def make_lane(direction: Direction) -> Lane:
        """Returns this rank's end of a lane; with Gloo it has a stream of its own."""
        sends = direction.source == view.rank
        peer = direction.target if sends else direction.source
        isend, irecv = isend_and_irecv(groups[direction], view.members[peer])
        transfer = isend if sends else irecv
        if not streams:
            return Lane(peer, view, transfer)
        stream = streams[direction.source > direction.target]
        seals = {peer: stream.seals[peer]} if stream.seals else None
        sockets = {peer: stream.sockets.pop(peer)}
        connection = SocketTransport(view.rank, view.ranks, sockets, timeout=timeout, seals=seals)
        return Lane(peer, connection, transfer, connection.interrupt)

    all_lanes = {direction: make_lane(direction) for direction in groups if view.rank in direction}
    for stream in streams:  # sockets to ranks that are no neighbours
        for sock in stream.sockets.values():
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
