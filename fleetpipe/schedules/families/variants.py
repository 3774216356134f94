"""The options of each family of schedules that the planner tries."""

from __future__ import annotations

import math

from fleetpipe.schedules.families.table import FAMILIES
from fleetpipe.schedules.rows import option_names_of


def variants(name: str, micro_batches: int, latency: float) -> list[dict[str, object]]:
    """Returns the sets of options, by name, to try for a family; one empty set without options.

    Args:
        name: A key of the families' table, of a family that does not cut sequences into slices.
        micro_batches: Micro-batches of a batch, m.
        latency: The latency of a transfer, divided by the time of a forward and a backward. In
            kFkB, groups of k micro-batches hide a latency of up to (k - 1) / 2; larger groups only
            take memory.
    """
    options = option_names_of(FAMILIES[name].rows)
    if "warmup_slack" in options:
        return [{"warmup_slack": 1}, {"warmup_slack": 2}]
    if name == "kFkB":
        # A group has 2 micro-batches or more, and not more than a batch has.
        most = max(2, min(micro_batches, 1 + math.ceil(2 * latency)))
        return [{"groups": [size]} for size in _numbers_to_try(most)]
    return [{}]


def _numbers_to_try(most: int) -> list[int]:
    """Returns 2, 3, 4, 6, 8, 12, .. up to ``most``, and ``most`` itself, ascending."""
    numbers = {most}
    for power in range(most.bit_length()):
        numbers |= {2 << power, 3 << power}
    return sorted(number for number in numbers if 2 <= number <= most)
