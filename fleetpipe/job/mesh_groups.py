"""Makes the groups of ranks that a process of a job is in, by what each rank holds of the model.

Each group is a view of the job's connections: it costs nothing, and no other rank has to take part
in its creation.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fleetpipe.mesh.axes import COPIES, REPLICA, SEQUENCE, SHARDS, Coordinate, Mesh
from fleetpipe.mesh.groups import Group

#: By axes, the method of Paddle's topology that returns Paddle's group along them.
_PADDLE_GROUPS: Mapping[tuple[str, ...], str] = {
    ("dp",): "get_data_parallel_group",
    ("sharding",): "get_sharding_parallel_group",
    ("sep",): "get_sep_parallel_group",
    ("cp",): "get_context_parallel_group",
    ("mp",): "get_model_parallel_group",
    ("moe_sharding",): "get_moe_sharding_parallel_group",
    ("ep",): "get_expert_parallel_group",
}


class MeshGroups(ABC):
    """Makes the groups of ranks that one process of a job is in.

    Attributes:
        mesh: The coordinates of all ranks.
        degrees: The number of ranks along each axis.
        hcg: Paddle's ``HybridCommunicateGroup``, or a ``LocalTopology``.
        local: Whether this one process plays all ranks.
    """

    def __init__(self, mesh: Mesh, hcg: Any, local: bool, fused_copies: Any) -> None:
        """Stores the coordinates of all ranks; groups are created at their first use.

        Args:
            mesh: The coordinates.
            hcg: The topology that the user sees.
            local: Whether this one process plays all ranks.
            fused_copies: Paddle's group of :meth:`copies`, if they span several axes; else None.
        """
        self.mesh, self.degrees, self.hcg, self.local = mesh, mesh.degrees, hcg, local
        self._fused_copies = fused_copies
        self._groups: dict[str, Group] = {}

    def pipeline_ranks(self) -> list[int]:
        """Returns for each rank of this process's pipeline its number in the job, in order."""
        return [0] * self.degrees.pp if self.local else self._ranks_along(["pp"])

    def group(self) -> Group:
        """Returns the group of this process's pipeline ranks, for collective operations."""
        return self.along("pp")

    def holders(self, ranks: Sequence[int]) -> Group:
        """Returns the group of some ranks of this pipeline, such as those that hold a tied weight.

        Args:
            ranks: The ranks' numbers in the pipeline, in the same order on all of them.
        """
        return self._named_group(
            f"holders {list(ranks)}", lambda: [self._ranks_along(["pp"])[rank] for rank in ranks]
        )

    def members(self, ranks: Sequence[int], purpose: str = "ranks") -> Group:
        """Returns a group of some ranks of the job, this process included.

        Args:
            ranks: The ranks' numbers in the job, in the same order on all of them.
            purpose: A text that separates groups: messages of one never reach one of another
                purpose.
        """
        return self._named_group(f"{purpose} {list(ranks)}", lambda: list(ranks))

    @functools.cached_property
    def coordinate(self) -> Coordinate:
        """This process's coordinate on each axis; the first rank's if it plays all ranks."""
        if self.local:
            return Coordinate()
        return self.mesh.coordinate(self.hcg.get_global_rank())

    def leads(self, *but: str) -> bool:
        """Returns whether this process is first on each axis that numbers ranks, except ``but``."""
        return self.coordinate.leads(*but)

    @functools.cached_property
    def replica(self) -> int:
        """The number of this process's replica of the model: its dp and sharding coordinates."""
        return self.mesh.replica(self.coordinate)

    @functools.cached_property
    def copy(self) -> int:
        """The number of this process in the group of :meth:`copies`."""
        return self.mesh.number(self.coordinate, COPIES)

    @functools.cached_property
    def shard(self) -> tuple[int, int]:
        """The index of this process's shard of tensor-parallel layers, and the number of shards."""
        return self.mesh.number(self.coordinate, SHARDS), self.degrees.split(*SHARDS)

    def replicas(self) -> Group:
        """Returns the group of ranks that hold the same part of the model and take other samples.

        It has all dp x sharding ranks with this rank's coordinate on every other axis, by replica.
        """
        return self.along(*REPLICA)

    def sequence(self) -> Group:
        """Returns the group of ranks that have parts of the same sequences."""
        return self.along(*SEQUENCE)

    def copies(self) -> Group:
        """Returns the group of ranks that hold the same parameters of the same stages.

        It has the replicas, and with sep or cp the ranks with other parts of their sequences:
        gradients are averaged over all of them.
        """
        return self.along(*COPIES)

    def expert_parallel(self) -> Group:
        """Returns the group of ranks that share the experts: along ep, or without it along dp."""
        return self.along(self._expert_axis)

    def expert_copies(self) -> Group:
        """Returns the group of ranks that hold the same experts of the same stages."""
        return self.along(*self.copy_axes(spread=True))

    def copy_axes(self, spread: bool, cut: Collection[str] = SHARDS) -> tuple[str, ...]:
        """Returns the axes along which ranks hold the same values of a parameter.

        Args:
            spread: Whether the parameter belongs to experts, which are spread over ranks.
            cut: The axes of ``SHARDS`` along which ranks hold shards of it, or different experts.
        """
        if spread and self.degrees.ep > 1:
            return ("moe_sharding",)
        axes = [axis for axis in COPIES if not spread or axis != self._expert_axis]
        return (*axes, *(axis for axis in SHARDS if axis not in cut))

    def beside_sharding(self, spread: bool) -> Group:
        """Returns the group of ranks that own the same optimizer shard of the same parameters.

        Args:
            spread: Whether the parameters belong to experts, which are spread over ranks.
        """
        axes = [axis for axis in COPIES if axis not in self.degrees.state_axes]
        if spread:  # along ep all copies of an expert share its state
            axes = [axis for axis in axes if axis != "dp" and self.degrees.ep == 1]
        return self.along(*axes)

    def expert_sharding(self) -> Group:
        """Returns the ranks that hold the same experts and share their optimizer's state."""
        return self.along("moe_sharding") if self.degrees.ep > 1 else self.sharding()

    def all_experts(self, sharded: bool) -> Group:
        """Returns the group of ranks that together hold all experts of a stage, each once.

        Args:
            sharded: Whether each rank counts only the experts whose optimizer state it stores.
        """
        copies = ("moe_sharding",) if self.degrees.ep > 1 else self.degrees.state_axes
        return self.along(*(copies if sharded else ()), self._expert_axis)

    def whole_model(self) -> Group:
        """Returns the group of ranks that together hold all stages and all experts."""
        return self.along("pp", self._expert_axis)

    @property
    def _expert_axis(self) -> str:
        """The axis along which experts are spread: ep, or without it dp."""
        return "ep" if self.degrees.ep > 1 else "dp"

    def model_parallel(self) -> Group:
        """Returns the group of ranks that hold the shards of this replica's stages, by shard."""
        return self.along(*SHARDS)

    def sharding(self) -> Group:
        """Returns the group of ranks that share the optimizer's state of their stages, by shard."""
        return self.along(*self.degrees.state_axes)

    def along(self, *axes: str) -> Group:
        """Returns the group of ranks that differ from this process on the given axes only."""
        return self._named_group(
            "+".join(axes), lambda: self._ranks_along(axes), self._paddle_group(axes)
        )

    def _ranks_along(self, axes: Sequence[str]) -> list[int]:
        """Returns the ranks of the job that differ from this process on some axes only."""
        return self.mesh.along(self.coordinate, axes)

    def _paddle_group(self, axes: Sequence[str]) -> Callable[[], Any] | None:
        """Returns a function that returns Paddle's group along some axes; None if it has none."""
        split = tuple(axis for axis in axes if getattr(self.degrees, axis) > 1)
        name = _PADDLE_GROUPS.get(split)
        if name is not None:
            method: Callable[[], Any] = getattr(self.hcg, name)
            return method
        copies = tuple(axis for axis in COPIES if getattr(self.degrees, axis) > 1)
        return (lambda: self._fused_copies) if split == copies else None

    def everyone(self) -> Group:
        """Returns the group of all ranks of the job, for small values only."""
        return self._named_group("everyone", lambda: list(range(self.hcg.nranks)))

    def _named_group(
        self,
        name: str,
        ranks: Callable[[], list[int]],
        paddle_group: Callable[[], Any] | None = None,
    ) -> Group:
        """Returns a group of the job; creates it at its first use.

        Args:
            name: The name of the group, unique in this process.
            ranks: Returns its members' ranks in the job, in their order.
            paddle_group: Returns Paddle's group of the same members, which adds large tensors.
        """
        if name not in self._groups:
            self._groups[name] = self._make_group(name, ranks, paddle_group)
        return self._groups[name]

    @abstractmethod
    def _make_group(
        self, name: str, ranks: Callable[[], list[int]], paddle_group: Callable[[], Any] | None
    ) -> Group:
        """Returns a new group over the job's connections; :meth:`_named_group` stores it."""
