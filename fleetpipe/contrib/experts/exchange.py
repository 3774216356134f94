"""Routes tokens to experts: sends them to the experts' ranks and back.

A *choice* is the number of an expert for a token, an int32 or int64; -1 is a dropped choice.
Results are those that Paddle documents. If the order of Paddle's kernels for GPUs is random, that
of its documentation holds: within an expert the last token comes first, and capacity is given to
members in their order and to tokens in theirs.

A rank sorts its tokens by member of the group and by that member's expert; an expert gets all of
its tokens, sorted by the member that sent them. ``counts_out`` and ``counts_in`` have the number of
tokens that go to and come from each (member, expert): int64 [members * experts of one member]. Each
exchange is the gradient of the other. ``fleetpipe.fleet.mixtures`` replaces some functions of
Paddle by those of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fleetpipe.aliases import DType, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel.groups import is_alone
from fleetpipe.dygraph.tensor_parallel.operations import collective
from fleetpipe.errors import UsageError
from fleetpipe.job.job import current_job, required_job
from fleetpipe.mesh import groups
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.distributed import group_of_ring
from fleetpipe.paddle_api.layer import MoEGather, MoEScatter
from fleetpipe.paddle_api.tensor import to_host

#: By member the number of tokens for each expert of one member.
Counts = Sequence[Sequence[int]]


def number_count(numbers: Tensor, upper_range: int) -> Tensor:
    """Returns the number of choices of each expert, int64 [upper_range].

    Args:
        numbers: The choices, of any shape.
        upper_range: Number of experts.

    Raises:
        UsageError: The choices are no whole numbers, or name an expert that does not exist.
    """
    _require_choices(numbers, upper_range)
    return _count_choices(numbers.flatten(), upper_range)[1:]


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
    """Returns how many choices of each member fit into each expert's capacity, in the same shape.

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
    # Dropped choices count as an expert before the first, without room.
    counts = _count_choices(flat, experts)
    starts = counts.cumsum() - counts
    free = paddle.concat([paddle.zeros([1], "int64"), expert_count.astype("int64")])
    # The position of each choice among those of its expert.
    position = paddle.arange(flat.shape[0]) - starts.index_select(chosen + 1)
    has_room = position < free.index_select(chosen + 1)
    sorted_choices = paddle.where(has_room, chosen, paddle.full_like(chosen, -1))
    pruned = paddle.scatter(paddle.zeros_like(flat), order, sorted_choices)
    return pruned.reshape(gate_idx.shape).astype(gate_idx.dtype)


def random_routing(prob: Tensor, topk_value: Tensor, topk_idx: Tensor) -> Tensor:
    """Returns two choices for each token; drops the second if twice its value is below ``prob``.

    Args:
        prob: A random number for each token.
        topk_value: The values of the choices, [tokens, 2].
        topk_idx: The two experts chosen for each token, [tokens, 2].
    """
    first, second = topk_idx.split(2, axis=1)
    is_dropped = 2 * topk_value[:, 1:] < prob.reshape([-1, 1]).astype(topk_value.dtype)
    return paddle.concat([first, paddle.where(is_dropped, paddle.full_like(second, -1), second)], 1)


def _count_choices(choices: Tensor, experts: int) -> Tensor:
    """Returns the number of dropped choices, then of each expert's choices: int64 [experts + 1]."""
    if choices.shape[0] == 0:  # Paddle 2.6.2 returns no counts then
        return paddle.zeros([experts + 1], "int64")
    return paddle.bincount(choices + 1, minlength=experts + 1).astype("int64")


def by_expert(choices: Tensor, last_first: bool = False) -> Tensor:
    """Returns the positions of choices in the order of their experts, dropped ones first.

    Args:
        choices: The choices, one-dimensional.
        last_first: Whether an expert's choices are in reverse order.
    """
    count = choices.shape[0]
    positions = paddle.arange(count)
    # By expert first, then by position; all keys differ, so that every sort gives one order.
    keys = choices.astype("int64") * count + (count - 1 - positions if last_first else positions)
    return paddle.argsort(keys)


def _require_choices(choices: Tensor, experts: int) -> None:
    """Raises UsageError if a choice is neither -1 nor the number of one of ``experts`` experts."""
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


def scatter(tokens: Tensor, counts_out: Tensor, counts_in: Tensor, group: Group) -> Tensor:
    """Sends tokens to the members that have their experts. Collective.

    Args:
        tokens: [tokens, width], sorted by member and expert.
        counts_out: Number of tokens that go to each (member, expert).
        counts_in: Number of tokens that come from each (member, expert).
        group: The members.

    Returns:
        The tokens that all members send to this member's experts, sorted by expert and member.

    Raises:
        PipelineTimeout: Some member did not come within the limit.
        UsageError: The counts do not add up to the number of tokens.
    """
    return _exchange_tokens(True, tokens, counts_out, counts_in, group)


def gather(tokens: Tensor, counts_out: Tensor, counts_in: Tensor, group: Group) -> Tensor:
    """Sends tokens back to the members that sent them with :func:`scatter`. Collective.

    The tokens are sorted by expert and member, as ``scatter`` returns them; the other arguments and
    the errors are the same.
    """
    return _exchange_tokens(False, tokens, counts_out, counts_in, group)


def _exchange_tokens(
    outward: bool, tokens: Tensor, counts_out: Tensor, counts_in: Tensor, group: Group
) -> Tensor:
    """Sends tokens to the experts if ``outward``, else back, with a gradient. Collective."""
    sent, received = (_counts_by_member(counts, group) for counts in (counts_out, counts_in))
    expected = sum(map(sum, sent if outward else received))
    if tokens.shape[0] != expected:
        raise UsageError(
            "the counts are not those of the tokens",
            expected=f"{expected} tokens",
            got=f"{tokens.shape[0]} tokens",
            fix="count the experts that the tokens were sorted by",
        )
    # The exchange, and that of the gradients.
    there, back = (
        partial(_exchange_without_gradient, way, sent, received, group)
        for way in (outward, not outward)
    )
    return collective(tokens, there, back)


def _exchange_without_gradient(
    outward: bool, sent: Counts, received: Counts, group: Group, tokens: Tensor
) -> Tensor:
    """Sends tokens to the experts if ``outward``, else back. Collective.

    Args:
        outward: True sends tokens to the experts, False sends results back.
        sent: By member and expert of that member, how many tokens this rank has for the expert.
        received: By member and expert of this rank, how many tokens come from the member.
        group: The members.
        tokens: [tokens, width], sorted by member and expert on the way out, by expert and member
            on the way back.
    """
    if not outward:
        tokens = _sort_by_column(tokens, list(zip(*received)))
    parts = _split_by_sizes(tokens, [sum(counts) for counts in (sent if outward else received)])
    arrived = _concat_filled(group.all_to_all(parts))
    return _sort_by_column(arrived, received) if outward else arrived


def _sort_by_column(tokens: Tensor, counts: Counts) -> Tensor:
    """Reorders tokens that are sorted by row and column of a table: by column, then row.

    Args:
        tokens: [tokens, width].
        counts: The number of tokens in each field of the table, by row and column.
    """
    flat = [count for row in counts for count in row]
    columns = len(counts[0])
    pieces = _split_by_sizes(tokens, flat)
    return _concat_filled([piece for column in range(columns) for piece in pieces[column::columns]])


def _split_by_sizes(tokens: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Splits tokens into consecutive pieces of the given sizes, which may be 0."""
    # Paddle's split takes no size of 0, and 2.6.2 no slice of that size.
    none = paddle.empty([0, *tokens.shape[1:]], tokens.dtype)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tokens[start : start + size] if size else none)
        start += size
    return pieces


def _concat_filled(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenates pieces of tokens, leaving out empty pieces, of which Paddle takes none."""
    filled = [piece for piece in pieces if piece.shape[0]]
    return paddle.concat(filled) if filled else pieces[0]


def _counts_by_member(counts: Tensor, group: Group) -> list[list[int]]:
    """Returns counts [members * experts of one member] as a list of lists, by member and expert."""
    if counts.shape[0] % group.ranks:
        raise UsageError(
            "there is a count for each expert of each member",
            expected=f"a multiple of {group.ranks} counts",
            got=f"{counts.shape[0]} counts",
            fix="give every member the same number of experts",
        )
    by_member: list[list[int]] = to_host(counts).reshape([group.ranks, -1]).tolist()
    return by_member


def members_of(group: PaddleGroup) -> Group:
    """Returns the job's own group of the ranks that are in one of Paddle's groups.

    Args:
        group: None for the default group.

    Raises:
        StateError: The group has several ranks, and no job has begun.
    """
    group = group_of_ring(0) if group is None else group
    if len(group.ranks) == 1:
        return SoleGroup()
    job = required_job(
        "tokens are exchanged between the ranks of a job, and there is none",
        got=f"a group of ranks {list(group.ranks)}",
    )
    return job.members(group.ranks)


def expert_parallel() -> Group:
    """Returns the group of ranks over which ``ep_degree`` spreads experts.

    Without a job, in a job of one process and within ``alone()``, it is this process alone.
    """
    job = current_job()
    return SoleGroup() if job is None or job.local or is_alone() else job.along("ep")


def global_scatter(
    x: Tensor, local_count: Tensor, global_count: Tensor, use_calc_stream: bool, ring_id: int
) -> Tensor:
    """Replaces Paddle's function of this name: see :func:`scatter`. Collective.

    Args:
        x: The tokens.
        local_count: ``counts_out`` of ``scatter``: how many tokens go to each (member, expert).
        global_count: ``counts_in``: how many tokens come from there.
        use_calc_stream: Has no effect.
        ring_id: Paddle's number of the group.
    """
    return scatter(x, local_count, global_count, members_of(group_of_ring(ring_id)))


def global_gather(
    x: Tensor, local_count: Tensor, global_count: Tensor, use_calc_stream: bool, ring_id: int
) -> Tensor:
    """Replaces Paddle's function of this name: see :func:`gather`. Collective.

    The arguments are those of :func:`global_scatter`, with the counts of the way to the experts.
    """
    return gather(x, local_count, global_count, members_of(group_of_ring(ring_id)))


def alltoall(
    in_tensor_list: Tensor, group: PaddleGroup = None, use_calc_stream: bool = True
) -> Tensor:
    """Sends a part of a tensor to each member, and concatenates the parts that arrive. Collective.

    Replaces Paddle's function of this name. The tensor is cut along its first dimension into one
    part for each member, all of the same size. ``use_calc_stream`` has no effect.
    """
    members = members_of(group)
    return paddle.concat(members.all_to_all(paddle.split(in_tensor_list, members.ranks)))


def no_check() -> None:
    """Does nothing; replaces Paddle's check of NCCL, which wheels for CPUs do not contain."""


def local_gather(
    inp: Tensor, pos: Tensor, out_batch_size: int, maybe_overlap: bool = True
) -> Tensor:
    """Returns ``out_batch_size`` rows; row i is the sum of the rows of ``inp`` with ``pos`` i.

    Without ``maybe_overlap`` no two rows have the same ``pos``.

    Paddle's own function, in 2.6.2 and 3.3.1, returns one of these rows instead of their sum. In
    the backward of ``MoELayer`` a token with several experts then has the gradient of one.
    """
    zeros = paddle.zeros([out_batch_size, inp.shape[-1]], inp.dtype)
    if 0 in pos.shape:
        return zeros
    exact: DType = "float64" if inp.dtype == paddle.float64 else "float32"
    rows = paddle.scatter(zeros.astype(exact), pos, inp.astype(exact), overwrite=not maybe_overlap)
    return rows.astype(inp.dtype)


def moe_scatter(tokens: Tensor, positions: Tensor, counts: Tensor, *arguments: object) -> Tensor:
    """Calls Paddle's ``MoEScatter.apply`` so that all ranks take part in its backward.

    If its tokens needed no gradient, a rank whose experts get no token would run no backward, and
    other ranks would wait for it in the exchange of gradients.

    Args:
        tokens: [tokens, width].
        positions: The positions of the choices, sorted by expert.
        counts: Number of choices of each expert.
        arguments: The other arguments of Paddle's function.
    """
    if tokens.stop_gradient and paddle.is_grad_enabled():
        tokens = tokens.detach()
        tokens.stop_gradient = False
    scattered: Tensor = MoEScatter.apply(tokens, positions, counts, *arguments)
    groups.note_tokens(positions.shape[0], tokens.shape[-1] * tokens.element_size(), counts)
    return scattered


def moe_gather(outputs: Tensor, *arguments: object) -> Tensor:
    """Calls Paddle's ``MoEGather.apply``, at which a profile stops to count the experts' time."""
    groups.note_outputs()
    gathered: Tensor = MoEGather.apply(outputs, *arguments)
    return gathered
