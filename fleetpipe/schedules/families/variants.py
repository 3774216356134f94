"""With which options of its own a family's schedule is worth a try."""

from __future__ import annotations

from fleetpipe.schedules.families.table import FAMILIES
from fleetpipe.schedules.options import names_of


def variants(name: str, micro_batches: int, hidden: float) -> list[dict[str, object]]:
    """Returns options for a family, each set once; one that is empty for a family without any.

    Args:
        name: A key of the families' table. Not that of one that cuts sequences into slices.
        micro_batches: Micro-batches of a batch, m.
        hidden: A latency in times of a forward and a backward together: groups of kFkB hide it
            where k - 1 is at least twice that, and larger groups only take memory.
    """
    options = names_of(FAMILIES[name].rows)
    if "warmup_slack" in options:
        return [{"warmup_slack": 1}, {"warmup_slack": 2}]
    if name == "kFkB":
        most = max(2, 1 + min(micro_batches, -int(-2 * hidden // 1)))
        return [{"groups": [size]} for size in counts(min(most, max(2, micro_batches)))]
    return [{}]


def counts(most: int) -> list[int]:
    """Returns numbers to try from 2 to ``most``: some small ones, then ever fewer, and ``most``."""
    numbers = {most}
    for power in range(most.bit_length()):
        numbers |= {2 << power, 3 << power}
    return sorted(number for number in numbers if 2 <= number <= most)
