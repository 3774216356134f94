"""Begins a job of several processes: they meet, are connected, agree, and have Paddle make groups.

The ranks meet in the store that rank 0 serves, and join once: from then on each has two streams to
every other, one for the watch, whose thread is never held up, and one for all that they compute.
"""

from __future__ import annotations

import copy
import functools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fleetpipe import systems
from fleetpipe.job import attempt_files, meeting
from fleetpipe.job.agreement import require_agreement
from fleetpipe.job.groups import gloo, paddle_groups
from fleetpipe.job.job import Job
from fleetpipe.job.store import JobStore
from fleetpipe.job.watching.watch import Watch
from fleetpipe.mesh.axes import Degrees
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.transport import SocketTransport
from fleetpipe.transport.joining.connections import join


def begin_together(
    degrees: Degrees,
    strategy: Any,
    facts: Mapping[str, str],
    timeout: float,
    number: int,
    init: Callable[[Any], object],
) -> Job:
    """Begins a job, whose ranks watch each other from the first moment on. Collective over the job.

    Args:
        degrees: How the ranks are split.
        strategy: The user's strategy.
        facts: What must be the same on all ranks before they make groups, by subject.
        timeout: Seconds that any wait for another rank may last.
        number: How many jobs the processes began before.
        init: Paddle's ``fleet.init``, which takes a strategy.

    Raises:
        ConfigError: The ranks differ in ``facts``.
        PeerFailed: Some rank failed, or Paddle could not make its groups.
        PipelineTimeout: Some rank did not arrive; the message says which.
        UsageError: This system runs no ranks.
    """
    systems.require_ranks()
    in_a_stage = degrees.mp * degrees.sep
    attempt_files.tell_replica(degrees.pp * in_a_stage, alone=in_a_stage == 1)
    store = _job_store(timeout)
    run = f"fleetpipe/{number}/run"
    if meeting.own_rank() == 0:
        store.set(run, uuid.uuid4().hex)
    watch, connections = _join(store, number, timeout)
    try:
        with watch.guarding(lambda: "beginning the job"):
            key = f"fleetpipe/{number}/strategy"
            agree = functools.partial(require_agreement, store, key, facts, timeout, watch.gone)
            paddle_groups.forget_where_in_doubt(number, store, agree)
            meeting.give_paddle_an_address(store, timeout)
            with paddle_groups.made_for(number, store, watch, timeout):
                hcg, fused = _make_groups(degrees, strategy, init)
            # The first rank of a group serves its store: it must not leave while others make it.
            meeting.meet(store, f"fleetpipe/{number}/groups", timeout)
            meeting.let_others_go(store, f"fleetpipe/{number}/groups/going")
    except BaseException:
        gloo.share_store_again()
        connections.close()
        watch.close()
        raise
    job = Job(
        *(degrees, hcg, timeout, number, store, watch, connections, fused),
        run=store.get(run).decode(),
        order=strategy.hybrid_parallel_order,
    )
    job.endings += [
        gloo.share_store_again,
        lambda: paddle_groups.trust(watch.failure is None),
    ]
    return job


def _job_store(timeout: float) -> JobStore:
    """Returns the store that all jobs of this process share, opened by the first of them."""
    if not _stores:
        _stores.append(meeting.open_store(timeout))
    _stores[0].timeout = timeout
    return _stores[0]


#: The one store: rank 0 cannot serve a second one at its endpoint.
_stores: list[JobStore] = []


def _join(store: JobStore, number: int, timeout: float) -> tuple[Watch, SocketTransport]:
    """Waits for all ranks and connects each to every other. Collective over the job.

    From now on the store's waits end when a rank fails.
    """
    store.check = lambda: None
    meeting.wait_for_all(store, number, timeout)
    rank, ranks = meeting.own_rank(), meeting.world_size()
    watched, used = join(
        rank=rank,
        ranks=ranks,
        store=store,
        namespace=f"fleetpipe/{number}/mesh",
        timeout=timeout,
        streams=2,
        attempt=attempt_files.number(),
    )
    watch = Watch(rank, *watched)
    store.check = watch.check
    connections = SocketTransport(rank, ranks, used.sockets, timeout=timeout, seals=used.seals)
    watch.on_failure(connections.interrupt)
    return watch, connections


def _make_groups(degrees: Degrees, strategy: Any, init: Callable[[Any], object]) -> tuple[Any, Any]:
    """Has Paddle make its groups. Collective over the job.

    Returns:
        Paddle's topology, and its group of all replicas where dp and sharding both split them.
    """
    strategy = copy.deepcopy(strategy)
    # Fleet works out dp_degree=-1 from mp_degree and pp_degree alone.
    strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in asdict(degrees).items()}
    drawn = paddle.get_rng_state()
    init(strategy)
    if strategy.tensor_parallel_configs["tensor_init_seed"] == -1:
        # With mp_degree above 1 Paddle seeds every rank with a number of its own, over the user's.
        paddle.set_rng_state(drawn)
    hcg = paddle_fleet.get_hybrid_communicate_group()
    if degrees.dp == 1 or degrees.sharding == 1:
        return hcg, None
    _, fused = hcg.create_fuse_group(["data", "sharding"])
    return hcg, fused
