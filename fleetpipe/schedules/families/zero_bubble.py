"""ZBH1 and ZBH2: backwards are split, and weight gradients fill the bubble.

Four ranks, F, I and W equally long; time runs to the right::

    ZBH1
    rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    ZBH2
    rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .  .  .
    rank 1  .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .  .
    rank 2  .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 .
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.families.interleaved import balanced_groups, in_groups
from fleetpipe.schedules.placement import Placement


def zb_h1(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of ZB-H1 (arXiv:2401.10241); with several chunks, of interleaved ZB-1P.

    With g0 the size of the first group (see ``interleaved``), in costs of one chunk:

    - bubble (p-1)(F+I-W) for m >= p, if W is not longer than F or I; (p-1)I if W is longer than F
      and v = 1;
    - every rank holds min(mv, (v-1)g0 + p) forwards of one chunk: for v = 1 as many as rank 0 of
      1F1B.

    Args:
        placement: A loop of p ranks with v chunks each.
        micro_batches: Micro-batches of a batch, m.
    """
    return _rows(placement, micro_batches, 1)


def zb_h2(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of ZB-H2 (arXiv:2401.10241), one stage on each rank.

    Bubble (p-1)(F+I-2W) for m >= 2p-1, if W is not longer than F or I; so none if all are equal.
    With fewer micro-batches ZBH1 ends as soon or sooner. Every rank holds the activations of min(m,
    2p-1) micro-batches.

    Args:
        placement: A loop of p ranks with one chunk each.
        micro_batches: Micro-batches of a batch, m.
    """
    return _rows(placement, micro_batches, 2)


def _rows(placement: Placement, micro_batches: int, k: int) -> list[list[Action]]:
    groups = balanced_groups(placement.ranks, micro_batches)
    rows = []
    for rank in range(placement.ranks):
        slack = k * (placement.ranks - 1 - rank)
        rows.append(_row(placement.stages_of(rank), groups, slack, lag=k * rank))
    return rows


def _row(stages: Sequence[int], groups: Sequence[int], slack: int, lag: int) -> list[Action]:
    """Returns the row of a rank on which each W runs ``lag`` input gradients after its own."""
    forwards = in_groups("F", stages, groups)
    gradients = in_groups("I", stages[::-1], groups)
    weights = in_groups("W", stages[::-1], groups)
    warm_up = min(slack + (len(stages) - 1) * groups[0], len(forwards))

    row = forwards[:warm_up]
    for step, gradient in enumerate(gradients):
        row += forwards[warm_up + step : warm_up + step + 1]
        row.append(gradient)
        if step >= lag:
            row.append(weights[step - lag])
    return row + weights[max(0, len(weights) - lag) :]
