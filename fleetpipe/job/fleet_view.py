"""Gives Fleet's functions a job's topology, and exchanges of values for ``fleet.util``.

The topology is built from the mesh if Paddle's constructors refuse the degrees. Exchanges, also for
``fleet.all_reduce``, go over the connections of the job: Fleet uses the Gloo of its role maker (its
description of this process), which is not set up in collective mode: each rank would get its own
number back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fleetpipe.aliases import PaddleGroup, Topology
from fleetpipe.errors import UsageError, nearest
from fleetpipe.job.job import all_ranks, current_job
from fleetpipe.mesh.axes import AXES, COPIES, DENSE, Mesh
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.distributed import MeshTopology, replacing_topology
from fleetpipe.transport.base import Value

#: Fleet's names of the axes that number ranks.
_NAMES = {
    "dp": "data",
    "pp": "pipe",
    "sharding": "sharding",
    "sep": "sep",
    "cp": "context",
    "mp": "model",
}

#: The reductions of ``fleet.util.all_reduce``, by name.
_MODES: Mapping[str, Callable[..., Any]] = {
    "sum": np.sum,
    "min": np.min,
    "max": np.max,
    "mean": np.mean,
}


@contextlib.contextmanager
def building_topology(mesh: Mesh) -> Iterator[None]:
    """Makes ``fleet.init`` within the context build a topology that Paddle's constructor refuses.

    Paddle's constructor refuses cp without experts, and experts beside dp or sep; for some orders
    the groups of its topology of experts contradict each other.
    """
    if mesh.degrees.cp == mesh.degrees.ep == 1:
        yield
        return
    with replacing_topology(lambda: mesh_topology(mesh, paddle.distributed.get_rank())):
        yield


def group_of_copies(mesh: Mesh) -> PaddleGroup:
    """Creates Paddle's group of the ranks that hold the same parameters as this one. Collective.

    Returns:
        The group; None unless these ranks span several axes: along one axis Paddle has a group.
    """
    mine = None
    if sum(getattr(mesh.degrees, axis) > 1 for axis in COPIES) > 1:
        for ranks in mesh.groups(COPIES):
            group = paddle.distributed.new_group(ranks=ranks)
            mine = group if paddle.distributed.get_rank() in ranks else mine
    return mine


def mesh_topology(mesh: Mesh, rank: int) -> Topology:
    """Builds Fleet's topology, with Paddle's groups, for ``rank``. Collective over the job."""
    degrees, coordinate = mesh.degrees, mesh.coordinate(rank)
    sizes = {axis: getattr(degrees, axis) for axis in AXES}
    positions = coordinate._asdict()
    sizes["cp_sharding"], positions["cp_sharding"] = sizes["sharding"], positions["sharding"]
    state = degrees.state_axes
    sizes["sharding"] = degrees.split(*state)
    positions["sharding"] = mesh.along(coordinate, state).index(rank)
    return MeshTopology(rank, sizes, positions, _numbering(mesh), _groups(mesh))


def _numbering(mesh: Mesh) -> list[tuple[str, int]]:
    """Returns the axes and sizes by which ranks are numbered, under Fleet's names."""
    digits = [(_NAMES[axis], size) for axis, size in mesh.digits]
    indices = [index for index, (name, _) in enumerate(digits) if name == "sharding"]
    if len(indices) > 1:
        for index, name in zip(indices, ("moe_sharding", "dense_sharding")):
            digits[index] = name, digits[index][1]
    return digits


def _groups(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Returns for each kind of group the ranks of its groups, in the order of creation."""
    state = mesh.degrees.state_axes
    axes = {
        "_pp": ("pp",),
        "_ep": ("ep",),
        "_moe_sharding": ("moe_sharding",),
        "_dp": ("dp",),
        "_sep": ("sep",),
        "_mp": ("mp",),
        "_sharding": state,
        "_cp": ("cp",),
        "_cp_mp": ("cp", "mp"),
        "_cp_sharding": ("sharding",),
        "_dp_sep": ("dp", "sep"),
        "_pp_mp": ("pp", "mp"),
        "_check": tuple(axis for axis in DENSE if axis != "dp"),
        "sharding_check": tuple(axis for axis in DENSE if axis not in state),
    }
    # As Paddle has them: by rank.
    return {name: [sorted(ranks) for ranks in mesh.groups(along)] for name, along in axes.items()}


class Workers:
    """Exchanges values in place of a role maker's Gloo; all ranks of the job are workers.

    Each method is collective over the job; ``comm_world`` is ignored.
    """

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> Any:
        """Returns the sum, min, max or mean (``mode``) of all ranks' arrays, of one shape."""
        if mode not in _MODES:
            raise UsageError(
                "fleet adds numbers of all ranks, or takes the least, the largest or the mean",
                got=f"mode={mode!r}",
                fix=nearest(mode, tuple(_MODES)),
            )
        array = np.array(input)
        parts = _gather(array.tolist())
        return _MODES[mode]([np.array(part, array.dtype) for part in parts], axis=0)

    def all_gather(self, input: Value, comm_world: str = "worker") -> list[Value]:
        """Returns the numbers of all ranks, by rank."""
        return _gather(input)

    def barrier(self, comm_world: str = "worker") -> None:
        """Waits for all ranks."""
        _gather(None)


def _gather(value: Value) -> list[Value]:
    """Returns the values of all ranks of the job, by rank; of this process without a job."""
    job = current_job()
    if job is None:
        return all_ranks().all_gather(value)

    def gather() -> list[Value]:
        job.require_others()
        return job.everyone().all_gather(value)

    return list(job.exchange("exchanging values of the script's", gather))
