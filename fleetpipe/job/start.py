"""Begins a job of several processes: they meet, connect, agree, and create Paddle's groups.

The ranks meet in the store that rank 0 serves, and connect once: each has two streams to every
other, one for the watch, whose thread is never blocked, and one for everything else.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from fleetpipe import systems
from fleetpipe.extras import extra
from fleetpipe.job import attempt_files, meeting, paddle_groups
from fleetpipe.job.job import Job
from fleetpipe.job.meeting import require_agreement
from fleetpipe.job.watch import Watch
from fleetpipe.mesh.axes import Mesh
from fleetpipe.transport import SocketTransport, Store
from fleetpipe.transport.base import PROCESS_GROUP, SOCKETS
from fleetpipe.transport.peer_connections import Joined, join


def begin_together(
    mesh: Mesh,
    facts: Mapping[str, str],
    timeout: float,
    number: int,
    make_groups: Callable[[], tuple[Any, Any]],
    transport: str = SOCKETS,
) -> Job:
    """Begins a job whose ranks watch each other from the start. Collective over the job.

    Args:
        mesh: The coordinates of all ranks.
        facts: Facts that must be the same on all ranks, by subject; compared before groups are
            created.
        timeout: Seconds that any wait for another rank may last.
        number: Number of earlier jobs of these processes, so that no key is used twice.
        make_groups: Creates Paddle's groups; returns its topology, and its group of the ranks that
            hold the same parameters if they span several axes.
        transport: The transport of a pipeline's tensors: "sockets" or "process_group".

    Raises:
        ConfigError: The ranks differ in ``facts``.
        PeerFailed: Some rank failed, or Paddle could not create its groups.
        PipelineTimeout: Some rank did not arrive; the message says which.
        UsageError: This system cannot run several ranks.
    """
    systems.require_ranks()
    if attempt_files.own_generation():
        begin_alone = extra("healing.replacement").begin_alone
        replacing: Job = begin_alone(mesh, timeout, number, make_groups, transport)
        return replacing
    rank, ranks = meeting.own_rank(), meeting.world_size()
    prefix = f"fleetpipe/{number}"
    store = meeting.come_together(number, timeout)
    if rank == 0:
        store.set(f"{prefix}/run", uuid.uuid4().hex)
    watch, joined = connect_ranks(store, f"{prefix}/mesh", timeout)
    # From now on the store's waits end when a rank fails.
    store.check = watch.check
    connections = SocketTransport(rank, ranks, joined.sockets, timeout=timeout, seals=joined.seals)
    watch.on_failure(connections.interrupt)
    agree = functools.partial(
        require_agreement, store, f"{prefix}/strategy", facts, timeout, watch.gone
    )
    try:
        with watch.guarding(lambda: "beginning the job"):
            meeting.give_paddle_an_address(store, timeout)
            paddle_groups.drop_doubtful_groups(number, store, agree)
            with paddle_groups.creating_groups(number, store, watch, timeout):
                hcg, copies = make_groups()
                by_groups = transport == PROCESS_GROUP and mesh.degrees.pp > 1
                groups = paddle_groups.make_groups(mesh) if by_groups else {}
            pipeline = None
            if groups:
                members = mesh.along(mesh.coordinate(rank), ["pp"])
                what = "having Paddle's groups connect neighbours"
                # Sockets say themselves who is missing, before the watch would.
                with paddle_groups.translating_errors(), watch.limit(2 * timeout, what, members):
                    pipeline = paddle_groups.connect_neighbours(
                        *(connections, members, groups, store, f"{prefix}/neighbours", timeout)
                    )
                watch.on_failure(pipeline.interrupt)
    except BaseException:
        paddle_groups.share_store_again()
        connections.close()
        watch.close()
        raise
    job = Job(
        *(mesh.degrees, hcg, timeout, number, store, watch, connections, copies),
        run=store.get(f"{prefix}/run").decode(),
        mesh=mesh,
        pipeline=pipeline,
        neighbours=groups,
    )
    job.compares_calls = not attempt_files.heals()
    job.endings += [
        paddle_groups.share_store_again,
        lambda: paddle_groups.mark_reusable(watch.failure is None),
    ]
    return job


def connect_ranks(store: Store, namespace: str, timeout: float) -> tuple[Watch, Joined]:
    """Connects this rank to all others. Collective over the job.

    Args:
        store: The store in which they find each other.
        namespace: Prefix of the keys in the store, new there.
        timeout: Seconds for all ranks to arrive.

    Returns:
        The watch over its own connections, and the connections for everything else.
    """
    rank = meeting.own_rank()
    for_watch, for_messages = join(
        rank=rank,
        ranks=meeting.world_size(),
        store=store,
        namespace=namespace,
        timeout=timeout,
        streams=2,
        attempt=attempt_files.number(),
    )
    return Watch(rank, *for_watch), for_messages
