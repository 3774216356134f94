"""Says why the groups that a user gave Interleaved1F1B do not run."""

from __future__ import annotations

from collections.abc import Iterable

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules.check.schedule import verify
from fleetpipe.schedules.families.interleaved import balanced_groups
from fleetpipe.schedules.rows import ScheduleRows


def refuse_groups(schedule: ScheduleRows, groups: Iterable[object]) -> None:
    """Raises the ConfigError of groups with which an interleaved schedule deadlocks."""
    try:
        verify(schedule)
    except ScheduleError as error:
        ranks = schedule.placement.ranks
        raise ConfigError(
            f"`groups` {list(groups)} deadlock",
            got=str(error),
            cause="the warm-up fits the first group, so a larger one comes too late; and a group of"
            f" fewer than {ranks} micro-batches can leave the ranks without work",
            fix=f"groups={balanced_groups(ranks, schedule.micro_batches)}",
        ) from error
