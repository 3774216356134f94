"""How many forwards' activations a rank holds, entry by entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.rows import ScheduleRows


class HeldAmounts(NamedTuple):
    """What a rank holds around one of its entries.

    Attributes:
        during: While it runs, before it releases anything.
        after: When it has ended.
    """

    during: float
    after: float


def held_around(
    schedule: ScheduleRows, rank: int, costs: Costs | None = None, *, in_bytes: bool = False
) -> Iterator[HeldAmounts]:
    """Yields what a rank holds while each of its entries runs and when it has ended.

    A forward holds its activations from its begin; B releases them at its end, I the share
    ``costs.input_grad_frees`` of them and W the rest. In a forward-only schedule they are released
    at the end of the forward itself.

    Args:
        schedule: A schedule.
        rank: The rank.
        costs: Says what I releases, and the bytes of each stage. Default ``Costs()``.
        in_bytes: Count ``costs.bytes``, not forwards of one stage.
    """
    costs = costs or Costs()
    rest = 1 - costs.input_grad_frees
    by_slice = costs.by_slice(schedule.slices)
    slices = schedule.slices

    def amount_of(action: Action) -> float:
        return by_slice[action.micro_batch % slices].bytes_of(action)

    # Forwards of which nothing is released, and those of which only I is done. They are summed
    # apart and weighted last, so that no rounding error builds up.
    whole: float = 0
    halves: float = 0
    for item in schedule.actions[rank]:
        actions = (item,) if isinstance(item, Action) else item.actions
        for action in actions:
            if action[0] == "F":
                whole += amount_of(action) if in_bytes else 1
        during = whole + rest * halves
        for action in actions:
            kind = action[0]
            amount = amount_of(action) if in_bytes else 1
            if kind == "B" or kind == "I" or schedule.forward_only:
                whole -= amount
            if kind == "I":
                halves += amount
            elif kind == "W":
                halves -= amount
        yield HeldAmounts(during, whole + rest * halves)
