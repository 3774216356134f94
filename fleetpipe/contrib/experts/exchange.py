"""Sends tokens to experts on other ranks and back: ``global_scatter``, ``global_gather``.

A rank sorts its tokens by member and by that member's expert; an expert gets all of its tokens,
sorted by the member that sent them. ``counts_out`` and ``counts_in`` say how many tokens go to and
come from each (member, expert): int64 [members * experts of one member]. Each exchange is the
gradient of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fleetpipe.aliases import PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel.groups import is_alone
from fleetpipe.dygraph.tensor_parallel.operations import collective
from fleetpipe.errors import UsageError
from fleetpipe.job.job import current_job, required_job
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.gloo.process_groups import group_of_ring
from fleetpipe.paddle_api.tensor import to_host

#: By member, how many tokens there are for each expert of one member.
Counts = Sequence[Sequence[int]]


def scatter(tokens: Tensor, counts_out: Tensor, counts_in: Tensor, group: Group) -> Tensor:
    """Returns the tokens that all members send to this one's experts, by expert. Collective.

    Args:
        tokens: [tokens, width], sorted by member and expert.
        counts_out: Number of tokens that go to each (member, expert).
        counts_in: Number of tokens that come from each (member, expert).
        group: The members.

    Raises:
        PipelineTimeout: Some member did not come within the limit.
        UsageError: The counts do not add up to the number of tokens.
    """
    return _exchange_both_ways(True, tokens, counts_out, counts_in, group)


def gather(tokens: Tensor, counts_out: Tensor, counts_in: Tensor, group: Group) -> Tensor:
    """Returns tokens to the members that sent them with :func:`scatter`. Collective.

    The tokens are sorted by expert and member, as it returned them; the other arguments and the
    errors are the same.
    """
    return _exchange_both_ways(False, tokens, counts_out, counts_in, group)


def _exchange_both_ways(
    outward: bool, tokens: Tensor, counts_out: Tensor, counts_in: Tensor, group: Group
) -> Tensor:
    sent, received = (_by_member(counts, group) for counts in (counts_out, counts_in))
    expected = sum(map(sum, sent if outward else received))
    if tokens.shape[0] != expected:
        raise UsageError(
            "the counts are not those of the tokens",
            expected=f"{expected} tokens",
            got=f"{tokens.shape[0]} tokens",
            fix="count the experts that the tokens were sorted by",
        )
    there, back = (partial(_exchange, way, sent, received, group) for way in (outward, not outward))
    return collective(tokens, there, back)


def _exchange(
    outward: bool, sent: Counts, received: Counts, group: Group, tokens: Tensor
) -> Tensor:
    """Exchanges tokens: to the experts if ``outward``, else back from them."""
    if not outward:
        tokens = _transpose(tokens, list(zip(*received)))
    parts = _split(tokens, [sum(counts) for counts in (sent if outward else received)])
    arrived = _join(group.all_to_all(parts))
    return _transpose(arrived, received) if outward else arrived


def _transpose(tokens: Tensor, counts: Counts) -> Tensor:
    """Sorts tokens by column and row of ``counts`` that are sorted by row and column."""
    flat = [count for row in counts for count in row]
    columns = len(counts[0])
    pieces = _split(tokens, flat)
    return _join([piece for column in range(columns) for piece in pieces[column::columns]])


def _split(tokens: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    # Paddle's split takes no size of 0, nor does 2.6.2 a slice of that.
    none = paddle.empty([0, *tokens.shape[1:]], tokens.dtype)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tokens[start : start + size] if size else none)
        start += size
    return pieces


def _join(pieces: Sequence[Tensor]) -> Tensor:
    filled = [piece for piece in pieces if piece.shape[0]]
    return paddle.concat(filled) if filled else pieces[0]


def _by_member(counts: Tensor, group: Group) -> list[list[int]]:
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
    """Returns the job's group of the ranks in a group of Paddle's.

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
    """Returns the ranks over which ``ep_degree`` spreads experts; this process if it is alone."""
    job = current_job()
    return SoleGroup() if job is None or job.local or is_alone() else job.along("ep")
