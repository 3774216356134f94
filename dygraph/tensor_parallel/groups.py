"""Finds the model-parallel group of a layer, and the connections to the group's members.

A member is a rank that holds a shard of the layer. A group of Paddle's lists the members, and could
send over Gloo. But Gloo fails if a member comes 30 s late, is slower than plain sockets for most
sizes, and does not notice when a member dies. So a job connects the group to its own connections
(:func:`connect`), over which members wait for each other within the user's limit.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from fleetpipe.aliases import PaddleGroup, Tensor
from fleetpipe.errors import StateError, UsageError
from fleetpipe.job import meeting
from fleetpipe.job.job import current_job
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.sums import tree
from fleetpipe.paddle_api import eager_operations, paddle
from fleetpipe.paddle_api.distributed import (
    Group,
    LocalTopology,
    hybrid_topology,
    install_topology,
    sole_group,
    user_strategy,
)
from fleetpipe.paddle_api.tensor import tensor_bytes

#: Tensors with more bytes are summed in a ring, if there are more than two members: then sending
#: every tensor to every member costs more.
_RING_BYTES = 256 * 1024

#: What :func:`connect` has connected, by the id of Paddle's group.
_connected: dict[int, Members] = {}
#: Whether :func:`alone` is open.
_alone = False


class Members(Protocol):
    """The group of a layer's members: the methods of :class:`fleetpipe.mesh.Group` that layers use.

    Attributes:
        rank: The number of the shard that this rank holds.
        ranks: The number of shards.
    """

    rank: int
    ranks: int

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """Returns the tensors of all members, by member, on every member. Collective."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by the sum of the members' tensors. Collective."""

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the sum of the parts that all members pass for this member. Collective."""


class StockGroup:
    """The members of a group of Paddle's, which send over Gloo; it waits 30 s for a late member."""

    def __init__(self, group: PaddleGroup) -> None:
        """Stores the members of ``group``."""
        self.rank = group.rank
        self.ranks = group.nranks
        self._group = group

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """Returns the tensors of all members, by member. Collective."""
        parts: list[Tensor] = []
        paddle.distributed.all_gather(parts, value, group=self._group)
        return parts

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by the sum of the members' tensors. Collective."""
        for tensor in tensors:
            paddle.distributed.all_reduce(tensor, group=self._group)

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the sum of all members' parts that are for this member. Collective."""
        self.all_reduce(parts)
        return parts[self.rank]


def sums_by_tree() -> bool:
    """Whether the current job, if there is one, sums gradients and losses by trees."""
    job = current_job()
    return job is not None and job.sums_by_tree


def total(tensor: Tensor, members: Members) -> Tensor:
    """Returns the sum of the members' tensors, with the same bits on each. Collective.

    The sum is by a tree if the job sums by trees.

    Raises:
        PipelineTimeout: Some member did not come within the limit.
    """
    if sums_by_tree():
        return tree(gather(tensor, members), eager_operations.total)
    if members.ranks > 2 and tensor_bytes(tensor) > _RING_BYTES:
        summed = tensor.detach().clone()
        members.all_reduce([summed])
        return summed
    return functools.reduce(operator.add, gather(tensor, members))


def gather(tensor: Tensor, members: Members) -> list[Tensor]:
    """Returns the tensors of all members, by member. Collective.

    Raises:
        PipelineTimeout: Some member did not come within the limit.
    """
    if members.ranks == 1:
        return [tensor]
    # A copy: the message may be on its way after the return, and autograd adds to gradients in
    # place.
    return members.all_gather(tensor.detach().clone())


def connect(paddle_group: PaddleGroup, group: Members) -> None:
    """Makes every operation among the members of ``paddle_group`` run over ``group`` from now on.

    Args:
        paddle_group: A model-parallel group of Paddle's.
        group: fleetpipe's group with the same members in the same order.

    Raises:
        UsageError: The two groups differ in size, or in this rank's number in them.
    """
    expected, got = (paddle_group.rank, paddle_group.nranks), (group.rank, group.ranks)
    if expected != got:
        raise UsageError(
            "a model-parallel group was given connections of another one",
            expected="member {} of {}".format(*expected),
            got="member {} of {}".format(*got),
            fix="connect it with a group of the same ranks in the same order",
        )
    _connected[paddle_group.id] = group


def disconnect(paddle_group: PaddleGroup) -> None:
    """Undoes :func:`connect` for a group of Paddle's; does nothing if it is not connected."""
    _connected.pop(paddle_group.id, None)


@contextmanager
def alone() -> Iterator[None]:
    """A context in which layers are built whole in this process, whatever their ``mp_group``.

    It builds the single-device model of a model-parallel job: under the same seed, the job's shards
    are cut from the same weights. Run the model within ``alone``, too: then operations of
    tensor-parallel layers have one member, and Fleet's topology reports one member to the model's
    own code.
    """
    global _alone
    if _alone:
        yield
        return
    _alone = True
    try:
        with _topology_of_one_member():
            yield
    finally:
        _alone = False


@contextmanager
def _topology_of_one_member() -> Iterator[None]:
    """A context in which Fleet's topology has one rank along each axis but pp."""
    topology = hybrid_topology()
    # Paddle's topology has no such method without ep_degree.
    experts = getattr(topology, "get_expert_parallel_world_size", lambda: 1)
    if topology is None or topology.get_model_parallel_world_size() == experts() == 1:
        yield
        return
    strategy = user_strategy()
    install_topology(LocalTopology(topology.get_pipe_parallel_world_size()), strategy)
    try:
        yield
    finally:
        install_topology(topology, strategy)


def is_alone() -> bool:
    """Whether :func:`alone` is open, so that layers have one member."""
    return _alone


def model_parallel_group(mp_group: PaddleGroup = None) -> PaddleGroup:
    """Returns Paddle's group of the members that hold the shards of a layer.

    Args:
        mp_group: The layer's argument; None for the model-parallel group of ``fleet.init``.

    Raises:
        StateError: The job has several processes, ``mp_group`` is None, and ``fleet.init`` was not
            called.
        UsageError: This rank is no member.
    """
    if _alone:
        return sole_group()
    if mp_group is None:
        topology = hybrid_topology()
        if topology is None and meeting.world_size() > 1:
            raise StateError(
                "a tensor-parallel layer was built before fleet.init",
                fix="call fleet.init(is_collective=True, strategy=strategy), or pass mp_group",
            )
        if topology is None:
            return sole_group()
        mp_group = topology.get_model_parallel_group()
    if list(mp_group.ranks) == [meeting.own_rank()]:
        # In a job of several ranks, Paddle's group of one rank reports that it has no member.
        return sole_group()
    if mp_group.rank < 0:
        raise UsageError(
            "this rank is no member of the layer's mp_group",
            got=f"a group of ranks {list(mp_group.ranks)}",
            fix="build the layer on the ranks of the group only",
        )
    return mp_group


def along(axis: str, group: PaddleGroup = None) -> Members:
    """Returns the members that hold the shards along an axis.

    Args:
        axis: One of ``SHARDS``.
        group: The members along mp, as Paddle's group or fleetpipe's; by default those of
            ``fleet.init``.
    """
    job = current_job()
    if axis == "mp" or job is None:
        return members_of(model_parallel_group() if group is None else group)
    return job.along(axis)


def members_of(group: PaddleGroup) -> Members:
    """Returns the members of a group of Paddle's or of fleetpipe's."""
    if not isinstance(group, Group):
        members: Members = group
        return members
    if group.nranks == 1:
        return SoleGroup()
    return _connected.get(group.id) or StockGroup(group)
