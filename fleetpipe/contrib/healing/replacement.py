"""The part of a process that replaces a rank: it begins alone, and joins the others at a step.

A generation is the set of processes that are the ranks; each replacement begins the next one. The
process runs the script from its beginning. Until its first batch no collective operation
reaches the other ranks, which have done these before; the state that differs between ranks is
restored (``restore``). Then all ranks connect again (``connect_again``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from fleetpipe import log, systems
from fleetpipe.contrib.kept_state.kept_state import KeptState
from fleetpipe.errors import CheckpointError, PeerFailed, PipelineTimeout, StateError
from fleetpipe.job import attempt_files, meeting, paddle_groups
from fleetpipe.job.attempt_files import Generation
from fleetpipe.job.job import ALONE, Job
from fleetpipe.job.start import connect_ranks
from fleetpipe.job.watch import Watch
from fleetpipe.launch.forked_ranks import EARLY
from fleetpipe.mesh.axes import Mesh
from fleetpipe.paddle_api.distributed import refuse_unconnected, replacing_store_and_groups
from fleetpipe.transport import ProcessGroupTransport, SocketTransport, View
from fleetpipe.transport.base import PROCESS_GROUP

#: Seconds within which a rank that connects Paddle's groups notices a death, if at all.
_STUCK_SECONDS = 5.0

_log = log.logger(__name__)
#: Seconds between two looks at the files of the other ranks.
_POLL_SECONDS = 0.01
#: The environment with which this process began; empty in one that replaces no rank.
ENVIRONMENT: dict[str, str] = {}


class GenerationChanged(PeerFailed):
    """Another rank has died while the ranks of a generation connected."""


def require_healing(now: Generation) -> None:
    """Raises PeerFailed if the launcher no longer replaces processes of the job."""
    if now.refused:
        raise PeerFailed(
            "a rank died, and no process takes its place",
            cause=now.refused,
            fix="none here: the job is started again, from what was kept",
        )


def connect_again(job: Job, now: Generation, store_moved: bool) -> None:
    """Connects all ranks of a generation. Collective over the job, in which some are new.

    Args:
        job: The job.
        now: The generation.
        store_moved: Whether the job's store is served by another process than before.

    Raises:
        GenerationChanged: Another rank has died meanwhile.
        PeerFailed: Another rank has died, or the launcher replaces no further process.
        PipelineTimeout: A rank did not come within the limit.
    """

    def require_same_generation() -> None:
        later = attempt_files.current_generation()
        require_healing(later)
        if later.number != now.number:
            raise GenerationChanged("another rank has died while the job healed")

    timeout = job.timeout
    # The prefix of the keys in the store by which the ranks of this generation meet.
    namespace = f"fleetpipe/0/generation/{now.number}"
    job.disconnect()
    if store_moved:
        store = meeting.open_store_again(timeout, require_same_generation)
    else:
        store = meeting.opened_store(timeout)
    store.check, store.timeout = require_same_generation, timeout
    meeting.meet(store, f"{namespace}/here", timeout, "the healing of the job")
    watch, connections = connect_ranks(store, f"{namespace}/mesh", timeout)
    # The main thread may notice a failure late: it heals the job instead of ending it.
    watch.patient = True
    job.connect_again(store, watch, connections, namespace)
    with killed_if_stuck(watch):
        paddle_groups.connect_members(store, f"{namespace}/groups", now.number, timeout)
        if job.neighbours:
            [view] = job.connect_among(job.pipeline_ranks()).values()
            where = store, f"{namespace}/neighbours", timeout
            job.connect_neighbours(*paddle_groups.lanes(cast(View, view), job.neighbours, *where))
    store.check = watch.check


@contextlib.contextmanager
def killed_if_stuck(watch: Watch) -> Iterator[None]:
    """Kills this process if another rank dies within the context, and the context lasts on.

    Gloo waits for ever for a member that has died, and no exception ends that. Another process then
    replaces this one, whose state is kept.
    """
    done = threading.Event()

    def kill_unless_done() -> None:
        if not done.wait(_STUCK_SECONDS):
            os.kill(os.getpid(), systems.SIGKILL)

    watch.on_failure(lambda: threading.Thread(target=kill_unless_done, daemon=True).start())
    try:
        yield
    finally:
        done.set()


def begin_alone(
    mesh: Mesh,
    timeout: float,
    number: int,
    make_groups: Callable[[], tuple[Any, Any]],
    transport: str,
) -> Job:
    """Begins the job of a process that replaces a rank, without connections to other ranks.

    Args:
        mesh: The coordinates of all ranks.
        timeout: Seconds that any wait for another rank may last.
        number: Number of earlier jobs of this process.
        make_groups: Makes the ranks' groups, as for :func:`fleetpipe.job.start.begin_together`.
        transport: The name of the transport between ranks.

    Raises:
        StateError: The script has begun a job before, or set variables that Paddle reads when
            loaded.
    """
    early = {name for name in {*os.environ, *ENVIRONMENT} if name.startswith(EARLY)}
    changed = [name for name in sorted(early) if os.environ.get(name) != ENVIRONMENT.get(name)]
    if changed and ENVIRONMENT:
        raise StateError(
            "the script sets variables that count when Paddle is loaded, and here it was loaded",
            got=", ".join(changed),
            fix="set them where the job is started, or launch without --heal",
        )
    if number:
        raise StateError(
            "a process that replaces a rank begins the first job of a script alone",
            got="another fleet.init after fleet.shutdown",
            fix="one job in a script, or launch without --heal",
        )
    rank, ranks = meeting.own_rank(), meeting.world_size()
    connections = SocketTransport(rank, ranks, {}, timeout=timeout)
    if rank == 0:
        meeting.opened_store(timeout)  # the others wait for it
    by_groups = transport == PROCESS_GROUP and mesh.degrees.pp > 1
    with _without_connections(timeout):
        # Paddle's topology, and its group of the ranks with the same parameters, or None.
        hcg, copies = make_groups()
        groups = paddle_groups.make_groups(mesh) if by_groups else {}
    pipeline = None
    if groups:
        members = mesh.along(mesh.coordinate(rank), ["pp"])
        pipeline = ProcessGroupTransport(View(connections, members), {}, {}, timeout)
    job = Job(
        *(mesh.degrees, hcg, timeout, number, None, None, connections, copies),
        mesh=mesh,
        pipeline=pipeline,
        neighbours=groups,
    )
    job.begin_alone()
    job.endings.append(paddle_groups.share_store_again)
    return job


def restore(states: KeptState, job: Job, directory: Path) -> int:
    """Restores a process that replaces a rank to the step of the others; returns that step.

    Args:
        states: The states that the replaced process has stored, one for each of its last steps.
        job: The job, which is not connected yet.
        directory: The directory of the attempt's files.

    Raises:
        CheckpointError: The others are at different steps, or at a step that this rank has not
            kept.
        PipelineTimeout: Some rank did not report its step within the limit.
    """
    deadline = time.monotonic() + job.timeout
    while True:
        now = attempt_files.current_generation()
        require_healing(now)
        # Ranks that began with this process or later have done no step, and wait for it.
        ranks, began = range(job.degrees.size), attempt_files.own_generation()
        awaited = {rank for rank in ranks if now.since.get(rank, 0) < began}
        step_of = attempt_files.waiting_places(directory, now.number)
        if awaited <= step_of.keys():
            break
        if time.monotonic() > deadline:
            raise PipelineTimeout(f"ranks {sorted(awaited - step_of.keys())} did not come to heal")
        time.sleep(_POLL_SECONDS)
    step = states.newest_of_all()
    # Some ranks may have done one step more, which they will repeat.
    others_steps = {done for done in step_of.values() if done != step}
    if step is None or len(others_steps) > 1 or min(others_steps, default=step) < step:
        why = f"ranks are at other steps than {step}, the newest that all have kept"
        attempt_files.tell_unhealed(why)
        raise CheckpointError(why, got=str(step_of))
    states.restore(step)
    states.forget_after(step)
    _log.info(f"this process has the place of rank {attempt_files.own_rank()} after {step} steps")
    return step


@contextlib.contextmanager
def _without_connections(timeout: float) -> Iterator[None]:
    """In this context, Paddle makes groups without connecting their members.

    The other ranks have made their groups before, and would not answer. Later an operation of such
    a group raises an error until the group is connected.

    Args:
        timeout: Seconds that a member of such a group may later wait for another one.
    """
    paddle_groups.make_unconnected(timeout)

    def make(new_group: Callable[..., Any], ranks: list[int], **options: Any) -> Any:
        return new_group(ranks, **options)

    with paddle_groups.translating_errors(), replacing_store_and_groups(lambda: None, make):
        yield
    refuse_unconnected(ALONE)
