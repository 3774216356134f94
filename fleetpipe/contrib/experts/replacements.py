"""What Paddle's mixtures of experts call in the place of Paddle's own functions.

``fleetpipe.fleet.mixtures`` puts it there.
"""

from __future__ import annotations

from fleetpipe.aliases import DType, PaddleGroup, Tensor
from fleetpipe.contrib.experts import exchange
from fleetpipe.contrib.experts.exchange import members_of
from fleetpipe.mesh import traffic
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import MoEGather, MoEScatter
from fleetpipe.paddle_api.topology import group_of_ring


def global_scatter(
    x: Tensor, local_count: Tensor, global_count: Tensor, use_calc_stream: bool, ring_id: int
) -> Tensor:
    """Returns the tokens that all members have for this one's experts. Collective."""
    return exchange.scatter(x, local_count, global_count, members_of(group_of_ring(ring_id)))


def global_gather(
    x: Tensor, local_count: Tensor, global_count: Tensor, use_calc_stream: bool, ring_id: int
) -> Tensor:
    """Returns this member's tokens, as they were before :func:`global_scatter`. Collective."""
    return exchange.gather(x, local_count, global_count, members_of(group_of_ring(ring_id)))


def alltoall(
    in_tensor_list: Tensor, group: PaddleGroup = None, use_calc_stream: bool = True
) -> Tensor:
    """Returns one tensor of the equal parts that all members have for this one. Collective."""
    members = members_of(group)
    return paddle.concat(members.all_to_all(paddle.split(in_tensor_list, members.ranks)))


def no_check() -> None:
    """Looks for no NCCL: CPUs have no use for it, and a wheel for CPUs has no version of it."""


def local_gather(
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


def scatter(tokens: Tensor, places: Tensor, counts: Tensor, *arguments: object) -> Tensor:
    """Does what Paddle's ``MoEScatter.apply`` does, and has all ranks come by its backward.

    Where its tokens need no gradient, a rank whose experts get none has nothing that does: others
    wait for it in the backward of their exchange.
    """
    if tokens.stop_gradient and paddle.is_grad_enabled():
        tokens = tokens.detach()
        tokens.stop_gradient = False
    scattered: Tensor = MoEScatter.apply(tokens, places, counts, *arguments)
    traffic.note_tokens(places.shape[0], tokens.shape[-1] * tokens.element_size(), counts)
    return scattered


def gather(outputs: Tensor, *arguments: object) -> Tensor:
    """Does what Paddle's ``MoEGather.apply`` does, at which the experts have computed."""
    traffic.note_outputs()
    gathered: Tensor = MoEGather.apply(outputs, *arguments)
    return gathered
