"""Functions that Paddle's mixtures of experts call instead of Paddle's own.

``fleetpipe.fleet.mixtures`` puts them in their places.
"""

from __future__ import annotations

from fleetpipe.aliases import DType, PaddleGroup, Tensor
from fleetpipe.contrib.experts import exchange
from fleetpipe.contrib.experts.exchange import members_of
from fleetpipe.mesh import traffic
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.gloo.process_groups import group_of_ring
from fleetpipe.paddle_api.layer import MoEGather, MoEScatter


def global_scatter(
    x: Tensor, local_count: Tensor, global_count: Tensor, use_calc_stream: bool, ring_id: int
) -> Tensor:
    """Returns the tokens that all members send to this one's experts. Collective."""
    return exchange.scatter(x, local_count, global_count, members_of(group_of_ring(ring_id)))


def global_gather(
    x: Tensor, local_count: Tensor, global_count: Tensor, use_calc_stream: bool, ring_id: int
) -> Tensor:
    """Returns tokens to the members that sent them with :func:`global_scatter`. Collective."""
    return exchange.gather(x, local_count, global_count, members_of(group_of_ring(ring_id)))


def alltoall(
    in_tensor_list: Tensor, group: PaddleGroup = None, use_calc_stream: bool = True
) -> Tensor:
    """Joins the equal parts that all members send to this one into one tensor. Collective."""
    members = members_of(group)
    return paddle.concat(members.all_to_all(paddle.split(in_tensor_list, members.ranks)))


def no_check() -> None:
    """Skips a check of NCCL, which CPUs do not use and wheels for CPUs do not contain."""


def local_gather(
    inp: Tensor, pos: Tensor, out_batch_size: int, maybe_overlap: bool = True
) -> Tensor:
    """Returns ``out_batch_size`` rows, each the sum of the rows of ``inp`` that go to it.

    Paddle's own function, in 2.6.2 and 3.3.1, returns one of those rows instead of their sum. In
    the backward of ``MoELayer`` a token with several experts then has the gradient of one.
    """
    zeros = paddle.zeros([out_batch_size, inp.shape[-1]], inp.dtype)
    if 0 in pos.shape:
        return zeros
    exact: DType = "float64" if inp.dtype == paddle.float64 else "float32"
    rows = paddle.scatter(zeros.astype(exact), pos, inp.astype(exact), overwrite=not maybe_overlap)
    return rows.astype(inp.dtype)


def scatter(tokens: Tensor, places: Tensor, counts: Tensor, *arguments: object) -> Tensor:
    """Calls Paddle's ``MoEScatter.apply`` so that all ranks take part in its backward.

    If the tokens needed no gradient, a rank whose experts get no token would run no backward, and
    other ranks would wait for it in the exchange of gradients.
    """
    if tokens.stop_gradient and paddle.is_grad_enabled():
        tokens = tokens.detach()
        tokens.stop_gradient = False
    scattered: Tensor = MoEScatter.apply(tokens, places, counts, *arguments)
    traffic.note_tokens(places.shape[0], tokens.shape[-1] * tokens.element_size(), counts)
    return scattered


def gather(outputs: Tensor, *arguments: object) -> Tensor:
    """Calls Paddle's ``MoEGather.apply``, and notes that the experts have computed."""
    traffic.note_outputs()
    gathered: Tensor = MoEGather.apply(outputs, *arguments)
    return gathered
