"""Replaces Paddle's private collective operations on CPU, where these have no kernels.

Scripts for Fleet call ``paddle.distributed.collective._c_identity`` and others. Each function here
has the signature of Paddle's, and runs over the members of its group; in static graph Paddle's own
runs. :func:`install` puts them into Paddle's modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from fleetpipe.aliases import Layer, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel import operations, sequence
from fleetpipe.dygraph.tensor_parallel.cross_entropy import ParallelCrossEntropy
from fleetpipe.dygraph.tensor_parallel.groups import connect, disconnect, model_parallel_group
from fleetpipe.dygraph.tensor_parallel.linear_and_embedding import own_rows
from fleetpipe.dygraph.tensor_parallel.operations import refuse_beside_trees
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.meta_parallel import GPU_OPERATIONS, OPERATION_MODULES, SEQUENCE_PARALLEL

Operation = Callable[..., Tensor]

#: Whether a CPU computes, so that Paddle's operations have no kernels.
_ON_CPU = device_kind() == "cpu"

#: The replacements of operations that Paddle's sequence parallelism calls; empty on a GPU.
SEQUENCE_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    name: getattr(sequence, name)
    for name in (
        "scatter",
        "all_gather",
        "reduce_scatter",
        "register_sequence_parallel_allreduce_hooks",
    )
    if _ON_CPU
}

#: Paddle's classes of linear layers with sequence parallelism.
_COLUMN, _ROW = (
    getattr(SEQUENCE_PARALLEL, f"{kind}SequenceParallelLinear") for kind in ("Column", "Row")
)


def _with_paddles_signature(function: Operation) -> Operation:
    """Gives a replacement of the operation with its name Paddle's signature.

    In static graph the result calls Paddle's own operation.
    """
    stock: Operation = getattr(OPERATION_MODULES[0], function.__name__)

    @functools.wraps(stock)
    def operation(*args: object, **named: object) -> Tensor:
        return (function if paddle.in_dynamic_mode() else stock)(*args, **named)

    return operation


def _is_no_member(group: PaddleGroup) -> bool:
    """Whether this rank is outside of ``group``; None stands for the group of ``fleet.init``."""
    return group is not None and not group.is_member()


def _members_to_sum(operation: str, group: PaddleGroup) -> PaddleGroup:
    """Returns Paddle's group of the members whose tensors an operation sums.

    Args:
        operation: The name of the operation, which is refused with sums by a tree.
        group: The argument of the script; None for the group of ``fleet.init``.
    """
    members = model_parallel_group(group)
    if members.nranks > 1:
        refuse_beside_trees(
            operation,
            "it adds up one tensor of each member, as many as mp_degree",
            "fleetpipe's tensor-parallel layers and parallel_matmul",
        )
    return members


@_with_paddles_signature
def _c_identity(
    tensor: Tensor, group: PaddleGroup = None, skip_c_identity_dynamic: bool = False
) -> Tensor:
    """Returns ``tensor``; its gradient is summed over the members. Collective in backward."""
    if _is_no_member(group):
        return None
    return operations.identity(tensor, _members_to_sum("_c_identity", group))


@_with_paddles_signature
def _c_split(tensor: Tensor, group: PaddleGroup = None) -> Tensor:
    """Returns this member's shard of the last axis. Collective in backward."""
    if _is_no_member(group):
        return None
    return operations.split(tensor, model_parallel_group(group))


@_with_paddles_signature
def _c_concat(tensor: Tensor, group: PaddleGroup = None) -> Tensor:
    """Returns the members' tensors joined along the last axis. Collective."""
    if _is_no_member(group):
        return None
    return operations.gather(tensor, model_parallel_group(group))


@_with_paddles_signature
def _mp_allreduce(
    tensor: Tensor,
    op: int = paddle.distributed.ReduceOp.SUM,
    group: PaddleGroup = None,
    use_calc_stream: bool = True,
    use_model_parallel: bool = True,
    skip_c_identity_dynamic: bool = False,
) -> Tensor:
    """Returns the sum of the members' tensors. Collective."""
    if _is_no_member(group):
        return None
    if op != paddle.distributed.ReduceOp.SUM:
        raise ConfigError(
            "_mp_allreduce adds",
            got=f"op={op!r}",
            fix="leave op as it is, ReduceOp.SUM, or use paddle.distributed.all_reduce",
        )
    return operations.all_reduce(tensor, _members_to_sum("_mp_allreduce", group))


@_with_paddles_signature
def _c_lookup_table(
    table: Tensor,
    index: Tensor,
    start_index: int = 0,
    vocab_size: int = -1,
    name: str | None = None,
) -> Tensor:
    """Looks up ids in this member's rows of a table; other ids give zeros. Not collective."""
    return own_rows(table, index, start_index)


@_with_paddles_signature
def _c_softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    group: PaddleGroup = None,
    return_softmax: bool = False,
    ignore_index: int = -100,
) -> Tensor:
    """Returns the loss of each row from columns of logits. Collective."""
    if _is_no_member(group):
        return None
    if return_softmax:
        raise ConfigError(
            "on CPU the cross entropy over shards of the vocabulary gives the loss alone",
            got="return_softmax=True",
            fix="gather the logits with _c_concat, and use nn.functional.softmax",
        )
    return ParallelCrossEntropy(group, ignore_index=ignore_index)(logits, label)


def _with_split_axes(stock: Callable[..., None], **axes: int) -> Callable[..., None]:
    """Returns the constructor of a layer that also marks the axes along which parameters are cut.

    Paddle 2.6.2 marks these axes only in layers without sequence parallelism.
    """

    @functools.wraps(stock)
    def construct(layer: Layer, *args: object, **named: object) -> None:
        """Builds the layer, and marks the axis along which each shard is cut."""
        stock(layer, *args, **named)
        for name, axis in axes.items():
            parameter: Tensor = getattr(layer, name, None)
            if getattr(parameter, "is_distributed", False):
                parameter.split_axis = axis

    return construct


#: The replacements of Paddle's operations, by Paddle's names; empty on a GPU.
OPERATIONS: Mapping[str, Operation] = {name: globals()[name] for name in GPU_OPERATIONS if _ON_CPU}

#: Modules and classes of Paddle's, each with the replacements of its attributes by name.
_REPLACEMENTS: list[tuple[Any, Mapping[str, Callable[..., Any]]]] = [
    *((module, OPERATIONS) for module in OPERATION_MODULES),
    (SEQUENCE_PARALLEL, SEQUENCE_OPERATIONS),
    (_COLUMN, {"__init__": _with_split_axes(_COLUMN.__init__, weight=1, bias=0)}),
    (_ROW, {"__init__": _with_split_axes(_ROW.__init__, weight=0)}),
]
#: Paddle's own attributes, in the same order.
_ORIGINALS = [{name: getattr(module, name) for name in names} for module, names in _REPLACEMENTS]


def install() -> None:
    """Puts the replacements into Paddle's modules."""
    for module, operations_of in _REPLACEMENTS:
        for name, operation in operations_of.items():
            setattr(module, name, operation)


def uninstall() -> None:
    """Restores Paddle's own operations in its modules."""
    for (module, _), originals in zip(_REPLACEMENTS, _ORIGINALS):
        for name, original in originals.items():
            setattr(module, name, original)


def connect_shards(job: Job) -> None:
    """Makes tensor-parallel layers communicate over a job's connections until the job ends."""
    paddle_group = job.hcg.get_model_parallel_group()
    connect(paddle_group, job.along("mp"))
    install()
    job.endings += [lambda: disconnect(paddle_group), uninstall]
