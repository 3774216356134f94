"""The part of the process that takes the place of a rank: it begins alone, and joins at a step.

The script runs from its beginning. Until its first batch, no collective operation of it meets the
other ranks: what these exchange there, they have exchanged; what differs between them is restored.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fleetpipe import log
from fleetpipe.contrib.healing.joining import require_going_on
from fleetpipe.contrib.kept_state.kept_state import KeptState
from fleetpipe.errors import CheckpointError, PipelineTimeout, StateError
from fleetpipe.job import attempt_files, generation, meeting
from fleetpipe.job.groups import neighbours, paddle_groups
from fleetpipe.job.job import ALONE, Job
from fleetpipe.launch.forked_ranks import EARLY
from fleetpipe.mesh.axes import Mesh
from fleetpipe.paddle_api.gloo.process_groups import refuse_unconnected
from fleetpipe.paddle_api.topology import beginning
from fleetpipe.transport import ProcessGroupTransport, SocketTransport, View
from fleetpipe.transport.base import PROCESS_GROUP

_log = log.logger(__name__)
_LOOK_SECONDS = 0.01
#: The environment with which this process began; empty in one that replaces no rank.
ENVIRONMENT: dict[str, str] = {}


def begin_alone(
    mesh: Mesh,
    timeout: float,
    number: int,
    make_groups: Callable[[], tuple[Any, Any]],
    transport: str,
) -> Job:
    """Begins the job of a process that replaces a rank, connected to nobody.

    Args:
        mesh: The places of all ranks.
        timeout: Seconds that any wait for another rank may last.
        number: Number of earlier jobs of this process.
        make_groups: As for :func:`fleetpipe.job.start.begin_together`.
        transport: As there.

    Raises:
        StateError: It is not the first job of the script, or the script has set variables that
            Paddle reads when it is loaded.
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
        meeting.opened_store(timeout)  # at which the others wait
    by_groups = transport == PROCESS_GROUP and mesh.degrees.pp > 1
    with _without_connections(timeout):
        hcg, copies = make_groups()
        groups = neighbours.make_groups(mesh) if by_groups else {}
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


def restore(kept: KeptState, job: Job, home: Path) -> int:
    """Restores a process that replaces a rank to the step of the others; returns that step.

    Raises:
        CheckpointError: The others are at different steps, or at one that this rank had not kept.
        PipelineTimeout: Some rank has not said within the limit at which step it is.
    """
    deadline = time.monotonic() + job.timeout
    while True:
        now = generation.current()
        require_going_on(now)
        # Those that began later, or with this one, have done nothing: they await this one.
        ranks, began = range(job.degrees.size), generation.began()
        awaited = {rank for rank in ranks if now.since.get(rank, 0) < began}
        places = generation.places(home, now.number)
        if awaited <= places.keys():
            break
        if time.monotonic() > deadline:
            raise PipelineTimeout(f"ranks {sorted(awaited - places.keys())} did not come to heal")
        time.sleep(_LOOK_SECONDS)
    step, why = kept.newest_of_all(), ""
    # Some may have done the one after it, of which fit counts the batches.
    if step is None or len({step, *places.values()}) > 2 or step > min([step, *places.values()]):
        why = f"ranks are at other steps than {step}, the newest that all have kept"
    if step is None or why:
        attempt_files.tell_unhealed(why)
        raise CheckpointError(why, got=str(places))
    kept.restore(step)
    kept.forget_after(step)
    _log.info(f"this process has the place of rank {attempt_files.own_rank()} after {step} steps")
    return step


@contextlib.contextmanager
def _without_connections(timeout: float) -> Iterator[None]:
    paddle_groups.make_unconnected(timeout)

    def make(new_group: Callable[..., Any], ranks: list[int], **options: Any) -> Any:
        return new_group(ranks, **options)

    with paddle_groups.translating_errors(), beginning(lambda: None, make):
        yield
    refuse_unconnected(ALONE)
