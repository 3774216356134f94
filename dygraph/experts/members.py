"""The ranks that hold the experts of one layer, and those that hold the same ones."""

from __future__ import annotations

from fleetpipe.aliases import PaddleGroup
from fleetpipe.dygraph.tensor_parallel.groups import is_alone
from fleetpipe.errors import StateError
from fleetpipe.job.job import current_job
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.paddle_api.topology import group_of_ring


def members_of(group: PaddleGroup) -> Group:
    """Returns the ranks of a group of Paddle's, as this job reaches them.

    Args:
        group: None for the default group.

    Raises:
        StateError: There are several, and no job.
    """
    group = group_of_ring(0) if group is None else group
    job = current_job()
    if len(group.ranks) == 1:
        return SoleGroup()
    if job is None:
        raise StateError(
            "tokens are exchanged between the ranks of a job, and there is none",
            got=f"a group of ranks {list(group.ranks)}",
            fix="call fleet.init(is_collective=True, strategy=strategy) first",
        )
    return job.members(group.ranks)


def expert_parallel() -> Group:
    """Returns the ranks among which ``ep_degree`` spreads experts; this process alone without."""
    job = current_job()
    return SoleGroup() if job is None or job.local or is_alone() else job.along("ep")
