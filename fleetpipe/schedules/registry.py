"""Schedules by name: those of the families, the search, and users' own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fleetpipe.errors import ConfigError, nearest
from fleetpipe.schedules.api import Schedule
from fleetpipe.schedules.check.groups import refuse_groups
from fleetpipe.schedules.families.table import FAMILIES, check_options, schedule_rows
from fleetpipe.schedules.placement import Placement, check_count
from fleetpipe.schedules.search.auto import auto

#: The name of the search, which has no rows of its own.
AUTO = "auto"

_INTERLEAVED = "Interleaved1F1B"


def names() -> tuple[str, ...]:
    """Returns the names that :func:`build` knows, without aliases."""
    return (*FAMILIES, AUTO)


def canonical_name(name: str) -> str:
    """Returns the name in the table for ``name``: case, ``-``, ``_`` and spaces do not count.

    Raises:
        ConfigError: No such schedule; the message names the nearest ones.
    """
    known = {_plain(spelling): canonical for spelling, canonical in _spellings()}
    try:
        return known[_plain(name)]
    except KeyError:
        raise ConfigError(
            f"there is no schedule {name!r}",
            fix=nearest(name, [spelling for spelling, _ in _spellings()]),
        ) from None


def default_chunks(name: str) -> int:
    """Returns the chunks on a rank where none are named, by canonical name."""
    return 1 if name == AUTO else FAMILIES[name].chunks


def build(
    name: str, *, ranks: int, micro_batches: int, chunks: int | None = None, **options: Any
) -> Schedule:
    """Builds a schedule by name.

    Args:
        name: One of :func:`names`, or an alias. Case, ``-``, ``_`` and spaces do not count.
            "1F1B" with several chunks means "Interleaved1F1B".
        ranks: Ranks of the pipeline, p.
        micro_batches: Micro-batches of a batch, m; any number, also fewer than ranks.
        chunks: Model parts that each rank owns, v; None means the schedule's own default: 2 for
            Interleaved1F1B and on a vee, else 1.
        **options: Options of that schedule: ``groups`` and ``warmup_slack`` of Interleaved1F1B;
            ``memory_cap``, ``costs`` and ``placed`` of auto.

    Raises:
        ConfigError: An unknown name or option, or numbers that the schedule does not take.

    Example:
        >>> build("1F1B", ranks=4, micro_batches=8).simulate().bubble
        9
    """
    canonical = canonical_name(name)
    check_count("micro_batches", micro_batches)
    if canonical == AUTO:
        placement = Placement("loop", ranks, 1 if chunks is None else chunks)
        check_options(AUTO, auto, options)
        schedule = Schedule.of(auto(placement, micro_batches, **options))
        limits = ("memory_cap", "costs")
        schedule.verify(**{option: options[option] for option in limits if option in options})
        return schedule
    schedule = Schedule.of(schedule_rows(canonical, ranks, micro_batches, chunks, options))
    if schedule.name == _INTERLEAVED and options.get("groups") is not None:
        refuse_groups(schedule, options["groups"])
    return schedule


def _spellings() -> Iterator[tuple[str, str]]:
    """Yields every name and alias, each with the name that it stands for."""
    for name, family in FAMILIES.items():
        for spelling in (name, *family.aliases):
            yield spelling, name
    yield AUTO, AUTO


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()
