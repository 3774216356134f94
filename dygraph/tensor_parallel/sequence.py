"""Sequence parallelism among the members of a tensor-parallel layer, under Fleet's names.

A member is a rank that holds a shard of the layer. Between tensor-parallel layers each member holds
only its part of the sequence, the first axis, so that norms, dropout and residuals are computed
once (Korthikanti et al., arXiv:2205.05198)::

    ScatterOp | norm | ColumnSequenceParallelLinear .. RowSequenceParallelLinear | norm | GatherOp
    parts       parts  gathers                          adds, and cuts in parts    parts  whole

Whole parameters that are applied to parts (the norms' parameters, the bias of the row layer) get a
part of their gradient on each member. They are marked as sequence-parallel, and a pipeline adds up
the parts of their gradients at the end of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetpipe.aliases import Layer, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel import operations
from fleetpipe.dygraph.tensor_parallel.groups import gather, members_of, model_parallel_group
from fleetpipe.dygraph.tensor_parallel.layer import marked
from fleetpipe.dygraph.tensor_parallel.linear_and_embedding import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from fleetpipe.dygraph.tensor_parallel.operations import refuse_beside_trees
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.meta_parallel import SEQUENCE_PARALLEL
from fleetpipe.paddle_api.tensor import call_after_gradient

mark_as_sequence_parallel_parameter = SEQUENCE_PARALLEL.mark_as_sequence_parallel_parameter
is_sequence_parallel_parameter = SEQUENCE_PARALLEL.is_sequence_parallel_parameter


def _group() -> PaddleGroup:
    """Returns Paddle's group of the ranks that split sequences; refuses sums by a tree."""
    _refuse_blocks()
    return model_parallel_group()


def _refuse_blocks() -> None:
    """Refuses sequence parallelism if the job has sums by a tree."""
    refuse_beside_trees(
        "sequence parallelism",
        "members add up the gradients of their parts of a sequence, as many as mp_degree",
        "ColumnParallelLinear and RowParallelLinear without it",
    )


@operations.recording_errors
def scatter(input: Tensor) -> Tensor:
    """Returns this member's part of the first axis, without a gradient; not collective."""
    group = _group()
    return operations.shard_of(input, 0, group.rank, group.nranks)


@operations.recording_errors
def all_gather(input: Tensor) -> Tensor:
    """Joins the parts of all members, without a gradient. Collective."""
    return paddle.concat(gather(input, members_of(_group())), axis=0)


@operations.recording_errors
def reduce_scatter(input: Tensor) -> Tensor:
    """Returns this member's part of the members' sum, without a gradient. Collective."""
    return operations.shard_of_sum(input, members_of(_group()))


class ScatterOp:
    """Returns this member's part of a sequence that is the same on all members."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """Returns ``[s / m, ..]`` from ``[s, ..]``. Collective in backward."""
        return operations.split(input, _group(), axis=0)


class GatherOp:
    """Joins the parts to the whole sequence, from which all members then compute the same."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """Returns ``[s, ..]`` from ``[s / m, ..]``. Collective."""
        return operations.gather(input, _group(), axis=0)


class AllGatherOp:
    """Joins the parts to the whole sequence, from which members then compute different values."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """Returns ``[s, ..]`` from ``[s / m, ..]``. Collective, in backward too."""
        return operations.gather_parts(input, _group())


class ReduceScatterOp:
    """Adds up the members' whole sequences, and returns this member's part of the sum."""

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """Returns ``[s / m, ..]`` from ``[s, ..]``. Collective, in backward too."""
        return operations.reduce_scatter(input, _group())


class ColumnSequenceParallelLinear(ColumnParallelLinear):
    """A ``ColumnParallelLinear`` whose input is a part of the sequence on each member.

    It takes ``[s / members, .., in_features]`` and returns this member's columns of
    ``[s, .., out_features]``; ``gather_output=False`` must be passed. Collective, in backward too.
    """

    def _require_layout(self) -> None:
        """Refuses ``gather_output=True``."""
        _refuse_blocks()
        if self.gather_output:
            raise ConfigError(
                "the columns of a ColumnSequenceParallelLinear stay on their members",
                got="gather_output=True",
                fix="pass gather_output=False",
            )

    def _full_input(self, x: Tensor) -> Tensor:
        """Returns the whole sequence, gathered from the members. Collective, in backward too."""
        return operations.gather_parts(x, self.model_parallel_group)


class RowSequenceParallelLinear(RowParallelLinear):
    """A ``RowParallelLinear`` whose output is a part of the sequence on each member.

    It takes this member's columns of ``[s, .., in_features]`` and returns ``[s / members, ..,
    out_features]``; ``input_is_parallel=True`` must be passed. Its bias is marked. Collective, in
    backward too.
    """

    def _require_layout(self) -> None:
        """Refuses ``input_is_parallel=False``."""
        _refuse_blocks()
        if not self.input_is_parallel:
            raise ConfigError(
                "a RowSequenceParallelLinear takes the columns that each member has",
                got="input_is_parallel=False",
                fix="pass input_is_parallel=True",
            )

    def create_bias(self, size: int, sharded: bool) -> Tensor:
        """Creates a bias marked as sequence-parallel: each member gets a part of its gradient."""
        bias = super().create_bias(size, sharded)
        if self.is_mp:
            mark_as_sequence_parallel_parameter(bias)
        return bias

    def _sum_over_members(self, terms: Tensor) -> Tensor:
        """Returns this member's part of the sum of the members' products. Collective."""
        return operations.reduce_scatter(terms, self.model_parallel_group)


def register_sequence_parallel_allreduce_hooks(
    model: Layer, accumulation_steps: int, fuse_sequence_parallel_allreduce: bool = False
) -> None:
    """Adds up the gradients of marked parameters over the members, by hooks; not collective.

    A pipeline adds them up itself, and no hook is registered. In any other model the members' sum
    replaces each of these gradients in every ``accumulation_steps``-th backward.

    Args:
        model: The model.
        accumulation_steps: The number of backwards before an optimizer step; 0 registers no hook.
        fuse_sequence_parallel_allreduce: Accepted; without effect.
    """
    group, job = model_parallel_group(), current_job()
    if accumulation_steps <= 0 or group.nranks == 1 or (job is not None and job.degrees.pp > 1):
        return
    for parameter in marked(model.parameters()):
        call_after_gradient(parameter, _make_summing_hook(parameter, accumulation_steps, group))


def _make_summing_hook(
    parameter: Tensor, accumulation_steps: int, group: PaddleGroup
) -> Callable[[], None]:
    """Returns a hook that sums a parameter's gradient over the members before each step.

    Args:
        parameter: The parameter.
        accumulation_steps: The number of backwards before a step.
        group: Paddle's group of the members.
    """
    backwards = 0

    @operations.recording_errors
    @paddle.no_grad()
    def hook(*_: Any) -> None:
        """Counts a backward; before each step, sums the gradient over the members."""
        nonlocal backwards
        backwards += 1
        if backwards % accumulation_steps:
            return
        job = current_job()
        if job is None or not job.trains([parameter]):
            gradient = getattr(parameter, "main_grad", None)
            members_of(group).all_reduce([parameter.grad if gradient is None else gradient])

    return hook
