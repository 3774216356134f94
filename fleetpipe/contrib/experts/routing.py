"""Paddle's five operations that route tokens to experts, which have no kernels for CPUs.

A *choice* is the number of an expert for a token, an int32 or int64; -1 stands for a choice that
was dropped. Results are those that Paddle documents. If its kernels for GPUs leave an order to
chance, the order of its documentation holds: within an expert the last token comes first, and
capacity goes to members in their order and to tokens in theirs.
"""

from __future__ import annotations

from fleetpipe.aliases import Tensor
from fleetpipe.errors import UsageError
from fleetpipe.paddle_api import paddle

__all__ = [
    "assign_pos",
    "by_expert",
    "limit_by_capacity",
    "number_count",
    "prune_gate_by_capacity",
    "random_routing",
]


def number_count(numbers: Tensor, upper_range: int) -> Tensor:
    """Returns how many choices fall on each expert, int64 [upper_range].

    Args:
        numbers: The choices, of any shape.
        upper_range: Number of experts.

    Raises:
        UsageError: The choices are no whole numbers, or name an expert that does not exist.
    """
    _require_choices(numbers, upper_range)
    return _counts(numbers.flatten(), upper_range)[1:]


def assign_pos(x: Tensor, cum_count: Tensor, eff_num_len: Tensor) -> Tensor:
    """Returns the positions of the choices, sorted by expert, int64 [eff_num_len].

    Args:
        x: The choices, of any shape.
        cum_count: Number of choices of each expert and those before it.
        eff_num_len: Number of choices that were not dropped.

    Raises:
        UsageError: The choices are no whole numbers, or name an expert that does not exist.
    """
    _require_choices(x, cum_count.shape[0])
    order = by_expert(x.flatten(), last_first=True)
    return order[order.shape[0] - int(eff_num_len) :]


def limit_by_capacity(expert_count: Tensor, capacity: Tensor, n_worker: int) -> Tensor:
    """Returns how many of each member's choices an expert has room for, in the same shape.

    Args:
        expert_count: Choices by member and expert, [n_worker * experts of one member].
        capacity: Room of each expert.
        n_worker: Number of members.

    Raises:
        UsageError: No expert has any room.
    """
    if int(capacity.max()) < 1 <= int(expert_count.max()):
        raise UsageError(
            "this capacity drops every token",
            expected="room for at least one token in some expert",
            got=f"a capacity of {int(capacity.max())} tokens",
            cause="the capacity of a gate is a factor of the tokens of a micro-batch, and is not "
            "above 0",
            fix="give the gate the capacity of training and of evaluation: capacity=(1.2, 2.4)",
        )
    counts = expert_count.reshape([n_worker, -1])
    filled = counts.cumsum(axis=0).minimum(capacity.clip(min=0).astype(counts.dtype))
    before = paddle.concat([paddle.zeros_like(filled[:1]), filled[:-1]])
    return (filled - before).reshape(expert_count.shape)


def prune_gate_by_capacity(
    gate_idx: Tensor, expert_count: Tensor, n_expert: int, n_worker: int
) -> Tensor:
    """Returns the choices, with -1 for those that an expert has no room for.

    Args:
        gate_idx: The choices, of any shape.
        expert_count: Room of each of all members' experts.
        n_expert: Experts of a member.
        n_worker: Number of members.

    Raises:
        UsageError: The choices are no whole numbers, or name an expert that does not exist.
    """
    experts = n_expert * n_worker
    _require_choices(gate_idx, experts)
    flat = gate_idx.flatten().astype("int64")
    if flat.shape[0] == 0:
        return gate_idx
    order = by_expert(flat)
    chosen = flat.index_select(order)
    # Dropped choices are an expert of their own, the first, with room for none.
    counts = _counts(flat, experts)
    starts = counts.cumsum() - counts
    free = paddle.concat([paddle.zeros([1], "int64"), expert_count.astype("int64")])
    position = paddle.arange(flat.shape[0]) - starts.index_select(chosen + 1)
    kept = paddle.where(
        position < free.index_select(chosen + 1), chosen, paddle.full_like(chosen, -1)
    )
    pruned = paddle.scatter(paddle.zeros_like(flat), order, kept)
    return pruned.reshape(gate_idx.shape).astype(gate_idx.dtype)


def random_routing(prob: Tensor, topk_value: Tensor, topk_idx: Tensor) -> Tensor:
    """Returns two choices for each token; drops the second if twice its value is below ``prob``.

    Args:
        prob: A random number for each token.
        topk_value: The values of the choices, [tokens, 2].
        topk_idx: The choices, likewise.
    """
    first, second = topk_idx.split(2, axis=1)
    left_out = 2 * topk_value[:, 1:] < prob.reshape([-1, 1]).astype(topk_value.dtype)
    return paddle.concat([first, paddle.where(left_out, paddle.full_like(second, -1), second)], 1)


def _counts(choices: Tensor, experts: int) -> Tensor:
    """Returns how many choices were dropped, and how many fall on each expert."""
    if choices.shape[0] == 0:  # of which Paddle 2.6.2 counts nothing
        return paddle.zeros([experts + 1], "int64")
    return paddle.bincount(choices + 1, minlength=experts + 1).astype("int64")


def by_expert(choices: Tensor, last_first: bool = False) -> Tensor:
    """Returns the positions of choices sorted by expert, within an expert in order or reversed."""
    count = choices.shape[0]
    positions = paddle.arange(count)
    keys = choices.astype("int64") * count + (count - 1 - positions if last_first else positions)
    return paddle.argsort(keys)


def _require_choices(choices: Tensor, experts: int) -> None:
    dtype = str(choices.dtype).rpartition(".")[2]
    if dtype not in ("int32", "int64"):
        raise UsageError(
            "tokens are routed by whole numbers, the experts that they go to",
            expected="a tensor of int64 or int32",
            got=f"{dtype}, of shape {list(choices.shape)}",
            fix="pass the indices of paddle.topk, not its values, or cast them to int64",
        )
    if 0 not in choices.shape and not -1 <= int(choices.min()) <= int(choices.max()) < experts:
        raise UsageError(
            "tokens are routed to experts that there are not",
            expected=f"numbers from 0 to {experts - 1}, or -1 for none",
            got=f"numbers from {int(choices.min())} to {int(choices.max())}",
            cause="the gate has scores for more experts than the layer has",
            fix="give the gate as many outputs as there are experts on all members together",
        )
