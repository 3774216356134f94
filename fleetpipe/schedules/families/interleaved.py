"""Interleaved1F1B: several chunks on each rank, so that the bubble is that of a chunk.

Three ranks with two chunks each, three micro-batches, B twice as long as F; small letters are the
second chunk, and time runs to the right::

    rank 0  F0 F1 F2 f0 f1 f2 .  .  .  .  b0--- .  b1--- .  b2--- B0--- B1--- B2---
    rank 1  .  F0 F1 F2 f0 f1 f2 .  b0--- .  b1--- .  b2--- B0--- B1--- B2--- .  .
    rank 2  .  .  F0 F1 F2 f0 b0--- f1 b1--- f2 b2--- B0--- B1--- B2--- .  .  .  .
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.schedules.action import Action
from fleetpipe.schedules.placement import Placement


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
    return [_row(placement.stages_of(rank), sizes, slack) for rank, slack in enumerate(slacks)]


def _row(stages: Sequence[int], groups: Sequence[int], slack: int) -> list[Action]:
    forwards = in_groups("F", stages, groups)
    backwards = in_groups("B", stages[::-1], groups)
    warm_up = min(slack + (len(stages) - 1) * groups[0], len(forwards))

    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        row += (forward, backward)
    return row + backwards[len(forwards) - warm_up :]


def in_groups(kind: str, stages: Sequence[int], groups: Sequence[int]) -> list[Action]:
    """Returns the actions of a rank's stages: one group through each stage, then the next group."""
    row: list[Action] = []
    first = 0
    for size in groups:
        row += [Action(kind, stage, k) for stage in stages for k in range(first, first + size)]
        first += size
    return row


def balanced_groups(ranks: int, micro_batches: int) -> list[int]:
    """Returns the sizes of groups of at least ``ranks`` micro-batches, as equal as can be.

    No group is larger than the first, since the warm-up fits that one. Equal sizes hold the fewest
    activations.
    """
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    return [size + 1] * larger + [size] * (count - larger)


def _check_groups(groups: Sequence[int], micro_batches: int) -> list[int]:
    """Returns ``groups`` as a list, after checking that they sum to a batch."""
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
