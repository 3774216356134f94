"""kFkB: 1F1B by groups of micro-batches, so that one value travels while others are computed.

Three ranks, six micro-batches in groups of two, B twice as long as F; a row is a rank, time runs to
the right::

    rank 0  F0 F1 F2 F3 F4 F5 .  .  B0--- B1--- .  .  B2--- B3--- .  .  B4--- B5---
    rank 1  .  F0 F1 F2 F3 .  B0--- B1--- F4 F5 B2--- B3--- .  .  B4--- B5--- .  .
    rank 2  .  .  F0 F1 B0--- B1--- F2 F3 B2--- B3--- F4 F5 B4--- B5--- .  .  .  .
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.schedules.action import Action
from fleetpipe.schedules.placement import Placement


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
    bounds = _bounds(groups, micro_batches)
    return [_row(stage, placement.ranks - 1 - stage, bounds) for stage in range(placement.ranks)]


def _row(stage: int, warm_up: int, bounds: Sequence[tuple[int, int]]) -> list[Action]:
    row: list[Action] = []
    for index in range(len(bounds) + warm_up):
        if index < len(bounds):
            row += [Action("F", stage, k) for k in range(*bounds[index])]
        if index >= warm_up:
            row += [Action("B", stage, k) for k in range(*bounds[index - warm_up])]
    return row


def _bounds(groups: Sequence[int], micro_batches: int) -> list[tuple[int, int]]:
    """Returns for each group its first micro-batch and the one after its last."""
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
