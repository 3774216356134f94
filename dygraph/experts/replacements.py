"""Paddle's operations for mixtures of experts, under Paddle's names, on machines without a GPU.

``paddle.incubate.distributed.models.moe.MoELayer`` and its gates call them, and libraries' layers.
"""

from __future__ import annotations

from fleetpipe.aliases import DType, PaddleGroup, Tensor
from fleetpipe.dygraph.experts import exchange, operations
from fleetpipe.dygraph.experts.exchange import members_of
from fleetpipe.mesh import traffic
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.layer import MoEGather, MoEScatter, replace_in_moe
from fleetpipe.paddle_api.operations import provide
from fleetpipe.paddle_api.topology import group_of_ring


def _global_scatter(
    x: Tensor, local_count: Tensor, global_count: Tensor, use_calc_stream: bool, ring_id: int
) -> Tensor:
    return exchange.scatter(x, local_count, global_count, members_of(group_of_ring(ring_id)))


def _global_gather(
    x: Tensor, local_count: Tensor, global_count: Tensor, use_calc_stream: bool, ring_id: int
) -> Tensor:
    return exchange.gather(x, local_count, global_count, members_of(group_of_ring(ring_id)))


def _alltoall(
    in_tensor_list: Tensor, group: PaddleGroup = None, use_calc_stream: bool = True
) -> Tensor:
    """Returns one tensor of the equal parts that all members have for this one. Collective."""
    members = members_of(group)
    return paddle.concat(members.all_to_all(paddle.split(in_tensor_list, members.ranks)))


def _no_check() -> None:
    """Looks for no NCCL: CPUs have no use for it, and a wheel for CPUs has no version of it."""


def _local_gather(
    inp: Tensor, pos: Tensor, out_batch_size: int, maybe_overlap: bool = True
) -> Tensor:
    """Returns ``out_batch_size`` rows, of which each is the sum of those of ``inp`` that go there.

    Paddle's own, of 2.6.2 and 3.3.1 alike, takes one of them for the sum. In the backward of
    ``MoELayer`` a token with several experts then has the gradient of one.
    """
    zeros = paddle.zeros([out_batch_size, inp.shape[-1]], inp.dtype)
    if 0 in pos.shape:
        return zeros
    exact: DType = "float64" if inp.dtype == paddle.float64 else "float32"
    rows = paddle.scatter(zeros.astype(exact), pos, inp.astype(exact), overwrite=not maybe_overlap)
    return rows.astype(inp.dtype)


class _Scatter:
    """Paddle's ``MoEScatter``, whose backward all ranks come by, or none.

    Where its tokens need no gradient, a rank whose experts get none has nothing that does: others
    wait for it in the backward of their exchange.
    """

    @staticmethod
    def apply(tokens: Tensor, places: Tensor, counts: Tensor, *arguments: object) -> Tensor:
        if tokens.stop_gradient and paddle.is_grad_enabled():
            tokens = tokens.detach()
            tokens.stop_gradient = False
        scattered: Tensor = MoEScatter.apply(tokens, places, counts, *arguments)
        traffic.note_tokens(places.shape[0], tokens.shape[-1] * tokens.element_size(), counts)
        return scattered


class _Gather:
    """Paddle's ``MoEGather``, at which the experts have computed."""

    @staticmethod
    def apply(outputs: Tensor, *arguments: object) -> Tensor:
        traffic.note_outputs()
        gathered: Tensor = MoEGather.apply(outputs, *arguments)
        return gathered


def install() -> None:
    """Mends ``MoELayer``, and has Paddle's functions do these operations where there is no GPU."""
    replace_in_moe(_local_gather=_local_gather, MoEScatter=_Scatter, MoEGather=_Gather)
    if device_kind() == "cpu":
        replace_in_moe(_alltoall=_alltoall, check_nccl_version_for_p2p=_no_check)
        routing = {name: getattr(operations, name) for name in operations.__all__}
        provide({**routing, "global_scatter": _global_scatter, "global_gather": _global_gather})
