"""FThenB, 1F1B and their variants: stages in a loop, and backwards that are not split.

Forwards only, for evaluation and prediction.

Four ranks with one stage each, four micro-batches; a row is a rank, time runs to the right::

    rank 0  F0 F1 F2 F3 .  .  .
    rank 1  .  F0 F1 F2 F3 .  .
    rank 2  .  .  F0 F1 F2 F3 .
    rank 3  .  .  .  F0 F1 F2 F3

FThenB: all forwards, then all backwards.

Four ranks, four micro-batches, B twice as long as F; a row is a rank, time runs to the right::

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3--- .  .
    rank 2  .  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .  .  .

1F1B and Eager1F1B: some forwards to warm up, then one forward and one backward in turn.

Four ranks, six micro-batches, B twice as long as F; a row is a rank, time runs to the right::

    1F1B
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---
    rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5--- .  .
    rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5--- .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .  .  .  .  .  .

    Eager1F1B
    rank 0  F0 F1 F2 F3 F4 F5 .  .  .  .  B0--- .  B1--- .  B2--- .  B3--- .  B4--- .  B5---
    rank 1  .  F0 F1 F2 F3 F4 .  .  B0--- F5 B1--- .  B2--- .  B3--- .  B4--- .  B5--- .  .
    rank 2  .  .  F0 F1 F2 .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5--- .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .  .  .  .  .  .

kFkB: 1F1B by groups of micro-batches, so that one value travels while others are computed.

Three ranks, six micro-batches in groups of two, B twice as long as F; a row is a rank, time runs to
the right::

    rank 0  F0 F1 F2 F3 F4 F5 .  .  B0--- B1--- .  .  B2--- B3--- .  .  B4--- B5---
    rank 1  .  F0 F1 F2 F3 .  B0--- B1--- F4 F5 B2--- B3--- .  .  B4--- B5--- .  .
    rank 2  .  .  F0 F1 B0--- B1--- F2 F3 B2--- B3--- F4 F5 B4--- B5--- .  .  .  .

Seq1F1B: 1F1B on slices of sequences, so that bubble and activations are those of a slice.

Three ranks, three micro-batches of two slices, B twice as long as F; small letters are the second
slice, and time runs to the right::

    rank 0  F0 f0 F1 f1 .  .  .  .  b0--- F2 B0--- f2 b1--- .  B1--- .  b2--- B2---
    rank 1  .  F0 f0 F1 .  .  b0--- f1 B0--- F2 b1--- f2 B1--- .  b2--- B2--- .  .
    rank 2  .  .  F0 f0 b0--- F1 B0--- f1 b1--- F2 B1--- f2 b2--- B2--- .  .  .  .

Interleaved1F1B: several chunks on each rank, so that the bubble is that of a chunk.

Three ranks with two chunks each, three micro-batches, B twice as long as F; small letters are the
second chunk, and time runs to the right::

    rank 0  F0 F1 F2 f0 f1 f2 .  .  .  .  b0--- .  b1--- .  b2--- B0--- B1--- B2---
    rank 1  .  F0 F1 F2 f0 f1 f2 .  b0--- .  b1--- .  b2--- B0--- B1--- B2--- .  .
    rank 2  .  .  F0 F1 F2 f0 b0--- f1 b1--- f2 b2--- B0--- B1--- B2--- .  .  .  .
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.schedules.action import Action, micro_batch_numbers
from fleetpipe.schedules.placement import Placement


def forward_rows(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns rows of F only, in an order that never deadlocks on any placement.

    F(s, k) runs at time s + k, the deeper stage first if two have the same time. Everything that an
    F waits for has a smaller s + k, so all rows follow one common order.
    """
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        row = [Action("F", stage, k) for stage in stages for k in range(micro_batches)]
        row.sort(key=lambda action: (action.stage + action.micro_batch, -action.stage))
        rows.append(row)
    return rows


def f_then_b(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of GPipe (arXiv:1811.06965); with several chunks, breadth-first in a loop.

    Bubble (p-1)(F+B) in costs of one chunk, with (v-1)(p-m)(F+B) more where m < p and v > 1; every
    rank holds the activations of all m micro-batches of its v chunks (arXiv:2211.05953).
    """
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        row = [Action("F", stage, k) for stage in stages for k in range(micro_batches)]
        row += [Action("B", stage, k) for stage in stages[::-1] for k in range(micro_batches)]
        rows.append(row)
    return rows


def one_f_one_b(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of 1F1B (PipeDream-flush, arXiv:2006.09503), one stage on each rank.

    Bubble (p-1)(F+B); rank r holds the activations of min(m, p-r) micro-batches.
    """
    return [
        _one_f_one_b_row(stage, placement.ranks - 1 - stage, micro_batches)
        for stage in range(placement.ranks)
    ]


def eager_one_f_one_b(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of Eager1F1B (arXiv:2211.05322): twice the warm-up of 1F1B.

    The bubble is the same without latency; with latency, the additional forwards hide it. Rank r
    holds the activations of min(m, 2(p-r)-1) micro-batches.
    """
    return [
        _one_f_one_b_row(stage, 2 * (placement.ranks - 1 - stage), micro_batches)
        for stage in range(placement.ranks)
    ]


def _one_f_one_b_row(stage: int, warm_up: int, micro_batches: int) -> list[Action]:
    """Returns the row of the rank of a stage: ``warm_up`` forwards, then F and B in turn."""
    forwards = [Action("F", stage, k) for k in range(micro_batches)]
    backwards = [Action("B", stage, k) for k in range(micro_batches)]
    warm_up = min(warm_up, micro_batches)

    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        row += (forward, backward)
    return row + backwards[micro_batches - warm_up :]


def k_f_k_b(
    placement: Placement, micro_batches: int, groups: Sequence[int] = (2,)
) -> list[list[Action]]:
    """Returns the rows of kFkB (Ada-Grouper, arXiv:2303.01675), one stage on each rank.

    1F1B with a group of k micro-batches in place of each one. Without latency the bubble is the
    same, (p-1)(F+B); with latency, a rank waits once for a group and not for each micro-batch of
    it. Rank r holds the activations of min(m, k(p-r)) micro-batches if all groups have k.

    Args:
        placement: A loop of p ranks with one chunk each.
        micro_batches: Micro-batches of a batch, m.
        groups: Sizes of the groups; the last one is repeated as often as needed, and shortened to
            fit. [k] means groups of k, [1] means 1F1B.

    Raises:
        ConfigError: Not a list of sizes, or more groups than micro-batches can fill.
    """
    bounds = _bounds_of_groups(groups, micro_batches)
    return [
        _k_f_k_b_row(stage, placement.ranks - 1 - stage, bounds) for stage in range(placement.ranks)
    ]


def _k_f_k_b_row(stage: int, warm_up: int, bounds: Sequence[tuple[int, int]]) -> list[Action]:
    """Returns the row of the rank of a stage, by groups of micro-batches.

    Args:
        stage: The stage.
        warm_up: The number of groups of forwards before the first group of forwards and backwards
            in turn.
        bounds: The result of :func:`_bounds_of_groups`.
    """
    row: list[Action] = []
    for index in range(len(bounds) + warm_up):
        if index < len(bounds):
            row += [Action("F", stage, k) for k in range(*bounds[index])]
        if index >= warm_up:
            row += [Action("B", stage, k) for k in range(*bounds[index - warm_up])]
    return row


def _bounds_of_groups(groups: Sequence[int], micro_batches: int) -> list[tuple[int, int]]:
    """Returns for each group its first micro-batch and the one after its last.

    Args:
        groups: Sizes of the groups; the last one is repeated until all micro-batches are in groups.
        micro_batches: Micro-batches of a batch, m.
    """
    if not isinstance(groups, (list, tuple)) or not groups:
        raise ConfigError("`groups` is no list of sizes", got=repr(groups), fix="groups=[2]")
    groups = [require_whole("groups", size) for size in groups]
    before = sum(groups[:-1])
    if before >= micro_batches and len(groups) > 1:
        raise ConfigError(
            "`groups` are more than the micro-batches of a batch fill",
            expected=f"sizes of which all but the last have a sum below {micro_batches}",
            got=f"{list(groups)}",
            fix="leave out sizes from the end",
        )
    ends = [*accumulate(groups[:-1]), *range(before + groups[-1], micro_batches, groups[-1])]
    return list(zip([0, *ends], [*ends, micro_batches]))


def seq_one_f_one_b(
    placement: Placement, micro_batches: int, slices: int = 2
) -> list[list[Action]]:
    """Returns the rows of Seq1F1B (arXiv:2406.03488), one stage on each rank.

    With k slices, in costs of one slice: bubble (p-1)(F+B) for m >= 1; rank r holds the activations
    of min(mk, p-r+k-1) slices. Forwards run in the order of the slices, since each attends to those
    before it; backwards run in the other order, so that the gradients of keys and values are
    complete when they are needed. One slice is 1F1B.

    Args:
        placement: A loop of p ranks with one chunk each.
        micro_batches: Micro-batches of a batch, m.
        slices: Slices of each micro-batch's sequence, k.
    """
    units = micro_batch_numbers(micro_batches, slices)
    firsts = range(0, len(units), slices)
    backwards = [unit for first in firsts for unit in units[first : first + slices][::-1]]
    rows = []
    for stage in range(placement.ranks):
        warm_up = min(placement.ranks - 2 - stage + slices, len(units))
        row = [Action("F", stage, unit) for unit in units[:warm_up]]
        for forward, backward in zip(units[warm_up:], backwards):
            row += (Action("F", stage, forward), Action("B", stage, backward))
        done = len(units) - warm_up
        rows.append(row + [Action("B", stage, unit) for unit in backwards[done:]])
    return rows


def interleaved_one_f_one_b(
    placement: Placement,
    micro_batches: int,
    groups: Sequence[int] | None = None,
    warmup_slack: int = 2,
) -> list[list[Action]]:
    """Returns the rows of interleaved 1F1B ("VPP", arXiv:2104.04473), for any p, v and m.

    A rank takes the micro-batches in groups: one group through each of its chunks, then the next.
    With g0 the size of the first group, in costs of one chunk, and without latency:

    - bubble (p-1)(F+B), and (v-1)(p-m)(F+B) more if m < p;
    - rank r holds min(mv, (v-1)g0 + warmup_slack*(p-1-r) + 1) forwards of one chunk.

    Args:
        placement: A loop of p ranks with v chunks each.
        micro_batches: Micro-batches of a batch, m.
        groups: Sizes of the groups. None means :func:`balanced_groups`, for which the figures above
            hold; a group of less than p micro-batches costs bubble, and other groups can deadlock:
            the caller has to check that.
        warmup_slack: Forwards that a rank warms up with for each rank after it: 2 hides latency,
            as Eager1F1B does, 1 holds fewer activations.

    Raises:
        ConfigError: Groups that do not sum to m micro-batches; another slack.
    """
    if warmup_slack not in (1, 2):
        raise ConfigError(
            "`warmup_slack` is out of range",
            expected="1 or 2",
            got=f"{warmup_slack!r}",
            fix="give 1 or 2, or leave it out",
        )
    if groups is None:
        sizes = balanced_groups(placement.ranks, micro_batches)
    else:
        sizes = _check_groups(groups, micro_batches)
    slacks = [warmup_slack * (placement.ranks - 1 - rank) for rank in range(placement.ranks)]
    return [
        _interleaved_row(placement.stages_of(rank), sizes, slack)
        for rank, slack in enumerate(slacks)
    ]


def _interleaved_row(stages: Sequence[int], groups: Sequence[int], slack: int) -> list[Action]:
    """Returns the row of a rank with several stages, which are in ascending order.

    ``groups`` are the sizes of the groups of micro-batches. ``slack`` is the number of forwards of
    the warm-up, beside those that lead the first group to the last stage.
    """
    forwards = in_groups("F", stages, groups)
    backwards = in_groups("B", stages[::-1], groups)
    warm_up = min(slack + (len(stages) - 1) * groups[0], len(forwards))

    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        row += (forward, backward)
    return row + backwards[len(forwards) - warm_up :]


def in_groups(kind: str, stages: Sequence[int], groups: Sequence[int]) -> list[Action]:
    """Returns the actions of a kind on a rank's stages, group by group of micro-batches.

    The first group runs on the first of ``stages``, on the second, and so on; then the next group.

    Args:
        kind: "F", "B", "I" or "W".
        stages: The rank's stages, in the order in which a group passes them.
        groups: Sizes of the groups.
    """
    row: list[Action] = []
    first = 0
    for size in groups:
        row += [Action(kind, stage, k) for stage in stages for k in range(first, first + size)]
        first += size
    return row


def balanced_groups(ranks: int, micro_batches: int) -> list[int]:
    """Returns the sizes of groups that micro-batches are divided into, which differ by at most 1.

    A group has at least as many micro-batches as there are ranks, if there are that many. Larger
    groups come first, since the warm-up fits the first one. Equal sizes hold the fewest
    activations.
    """
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    return [size + 1] * larger + [size] * (count - larger)


def _check_groups(groups: Sequence[int], micro_batches: int) -> list[int]:
    """Returns a user's sizes of groups as a list; refuses sizes that do not sum to a batch."""
    if not isinstance(groups, (list, tuple)):
        raise ConfigError("`groups` is no list of sizes", got=repr(groups), fix="groups=[4, 4]")
    groups = [require_whole("groups", size) for size in groups]
    if sum(groups) != micro_batches:
        raise ConfigError(
            "`groups` must make up the micro-batches of a batch",
            expected=f"sizes with the sum {micro_batches}",
            got=f"{list(groups)}, which is {sum(groups)}",
            fix="change the sizes, or leave `groups` out",
        )
    return list(groups)
