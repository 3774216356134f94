"""Keeps the replicas of a pipeline alike: their gradients at every step, and their losses."""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.broadcast import is_spread
from fleetpipe.dygraph.gradients import gradient_of, set_gradient, zero_gradient
from fleetpipe.dygraph.tensor_parallel import is_sequence_parallel_parameter
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import tensor_bytes

#: Gradients are added in pieces of about this size: few calls, and no second copy of them all.
_PIECE_BYTES = 128 * 1024 * 1024


def reduce_all(parameters: Sequence[Tensor], job: Job, share: float) -> None:
    """Adds up the gradients of all copies of a stage, and experts' over their own copies.

    An expert has the tokens of all ranks that it is spread over: its gradient is the sum of theirs,
    and counts by the same share as others. Members of tensor-parallel layers have the same tokens,
    and one of them counts, unless they have parts of a sequence: the expert is marked then, as
    other parameters are. Collective over the copies.

    Args:
        parameters: This rank's parameters, the same on every copy.
        job: The job.
        share: What each gradient is multiplied by.

    Raises:
        ConfigError: A gradient is sparse.
        PipelineTimeout: Some copy did not come within the limit.
    """
    spread = [parameter for parameter in parameters if is_spread(parameter)]
    reduce_gradients([p for p in parameters if not is_spread(p)], job.copies(), share)
    if spread:
        alike = job.degrees.mp if job.degrees.ep > 1 else 1
        of_parts = [p for p in spread if is_sequence_parallel_parameter(p)]
        of_all = [p for p in spread if not is_sequence_parallel_parameter(p)]
        reduce_gradients(of_parts, job.expert_copies(), share)
        reduce_gradients(of_all, job.expert_copies(), share / alike)


def reduce_gradients(parameters: Sequence[Tensor], group: Group, share: float = 1.0) -> None:
    """Adds up the gradients of ranks that hold the same parameters, fused. Collective over these.

    A parameter that had no gradient on some rank counts as zero there. The result has the same
    bits on every rank.

    Args:
        parameters: This rank's parameters, the same on every replica.
        group: The replicas: all ranks of dp and sharding that hold these parameters.
        share: What each gradient is multiplied by.

    Raises:
        ConfigError: A gradient is sparse.
        PipelineTimeout: Some replica did not come within the limit.
    """
    if group.ranks == 1 and share == 1.0:
        return
    present = [gradient_of(parameter) is not None for parameter in parameters]
    everywhere = group.all_gather("".join("01"[flag] for flag in present))
    gradients = []
    for index, parameter in enumerate(parameters):
        if not any(flags[index] == "1" for flags in everywhere):
            continue
        if not present[index]:
            set_gradient(parameter, zero_gradient(parameter))
        gradients.append(_dense(gradient_of(parameter), parameter))
    for piece in _pieces(gradients):
        _add_up(piece, group, share)


def mean_loss(loss: Tensor, group: Group) -> Tensor:
    """Returns the mean of the replicas' losses, the same bits on each. Collective over these."""
    if group.ranks == 1:
        return loss
    first, *rest = group.all_gather(loss)
    for other in rest:
        first = first + other
    return first / group.ranks


def _dense(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.is_selected_rows():
        raise ConfigError(
            f"the gradient of {parameter.name} is sparse, and replicas add up dense ones",
            cause="an Embedding(sparse=True)",
            fix="build it with sparse=False",
        )
    return gradient


def _pieces(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Sorts gradients by dtype into pieces that are added at once."""
    pieces: list[list[Tensor]] = []
    open_pieces: dict[str, tuple[list[Tensor], int]] = {}
    for gradient in gradients:
        kind = str(gradient.dtype)
        piece, size = open_pieces.get(kind, ([], _PIECE_BYTES))
        nbytes = tensor_bytes(gradient)
        if size + nbytes > _PIECE_BYTES:
            piece, size = [], 0
            pieces.append(piece)
        piece.append(gradient)
        open_pieces[kind] = (piece, size + nbytes)
    return pieces


@paddle.no_grad()
def _add_up(piece: Sequence[Tensor], group: Group, share: float) -> None:
    """Replaces the gradients of a piece by the sum over ``group`` of ``share`` of each."""
    # Paddle's fused_allreduce_gradients_with_group works in its own groups alone, asserts where a
    # gradient is sparse, and does not meet the others before it enters Gloo.
    flat = paddle.concat([gradient.reshape([-1]) for gradient in piece])
    flat.scale_(share)
    group.all_reduce([flat])
    parts = paddle.split(flat, [int(gradient.size) for gradient in piece])
    for gradient, part in zip(piece, parts):
        paddle.assign(part.reshape(gradient.shape), gradient)
