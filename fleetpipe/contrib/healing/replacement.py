"""The part of the process that takes the place of a rank: it begins alone, and joins at a step.

The script runs from its beginning. Until its first batch, no collective operation of it meets the
other ranks: what these exchange there, they have exchanged; what differs between them is restored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from fleetpipe.errors import StateError
from fleetpipe.job import meeting
from fleetpipe.job.groups import neighbours, paddle_groups
from fleetpipe.job.job import ALONE, Job
from fleetpipe.mesh.axes import Mesh
from fleetpipe.paddle_api.gloo.process_groups import refuse_unconnected
from fleetpipe.paddle_api.topology import beginning
from fleetpipe.transport import ProcessGroupTransport, SocketTransport, View
from fleetpipe.transport.base import PROCESS_GROUP

#: The environment with which this process began; empty in one that replaces no rank.
ENVIRONMENT: dict[str, str] = {}
#: Variables that count when Paddle is loaded, which it was before the script could set them.
_EARLY = ("FLAGS_", "OMP_", "MKL_", "KMP_", "CUDA_", "OPENBLAS_")


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
    early = {name for name in {*os.environ, *ENVIRONMENT} if name.startswith(_EARLY)}
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


@contextlib.contextmanager
def _without_connections(timeout: float) -> Iterator[None]:
    paddle_groups.make_unconnected(timeout)

    def make(new_group: Callable[..., Any], ranks: list[int], **options: Any) -> Any:
        return new_group(ranks, **options)

    with paddle_groups.translating_errors(), beginning(lambda: None, make):
        yield
    refuse_unconnected(ALONE)
