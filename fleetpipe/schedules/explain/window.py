"""The entries of a row around a culprit, that one marked: where an error says that it happened."""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.schedules.rows import ScheduleRows


def window(row: Sequence[object], position: int, reach: int = 3) -> str:
    """Returns the entries of a row around ``position``, that one marked ``>>F0.3<<``."""
    first, last = max(0, position - reach), min(len(row), position + reach + 1)
    shown = [str(entry) for entry in row[first:last]]
    if position < len(row):
        shown[position - first] = f">>{shown[position - first]}<<"
    before = ["..."] if first else []
    after = ["..."] if last < len(row) else []
    return " ".join(before + shown + after)


def where(schedule: ScheduleRows, rank: int, position: int) -> str:
    """Returns "rank 1 at #17: ..F0.2 >>B0.1<< F0.3.." for an error."""
    return f"rank {rank} at #{position}: {window(schedule.actions[rank], position)}"
