"""The options of each family of schedules that the planner tries."""

from __future__ import annotations

from fleetpipe.schedules.families.table import FAMILIES
from fleetpipe.schedules.rows import option_names_of


def variants(name: str, micro_batches: int, hidden: float) -> list[dict[str, object]]:
    """Returns the sets of options to try for a family; one empty set if it has no options.

    Args:
        name: A key of the families' table, of a family that does not cut sequences into slices.
        micro_batches: Micro-batches of a batch, m.
        hidden: The latency to hide, divided by the time of a forward and a backward. Groups of k in
            kFkB hide it if k - 1 is at least twice that; larger groups only take memory.
    """
    options = option_names_of(FAMILIES[name].rows)
    if "warmup_slack" in options:
        return [{"warmup_slack": 1}, {"warmup_slack": 2}]
    if name == "kFkB":
        most = max(2, 1 + min(micro_batches, -int(-2 * hidden // 1)))
        return [{"groups": [size]} for size in _numbers_to_try(min(most, max(2, micro_batches)))]
    return [{}]


def _numbers_to_try(most: int) -> list[int]:
    """Returns 2, 3, 4, 6, 8, 12, .. up to ``most``, and ``most`` itself, ascending."""
    numbers = {most}
    for power in range(most.bit_length()):
        numbers |= {2 << power, 3 << power}
    return sorted(number for number in numbers if 2 <= number <= most)
