"""The table of schedules by name. A new family is one file, and one line here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Union

from fleetpipe.errors import ConfigError, nearest
from fleetpipe.schedules.action import Item
from fleetpipe.schedules.families.controllable_memory import v_half, v_min
from fleetpipe.schedules.families.dualpipev import dual_pipe_v
from fleetpipe.schedules.families.f_then_b import f_then_b
from fleetpipe.schedules.families.interleaved import interleaved_one_f_one_b
from fleetpipe.schedules.families.one_f_one_b import eager_one_f_one_b, one_f_one_b
from fleetpipe.schedules.families.zbv import zb_v
from fleetpipe.schedules.families.zero_bubble import zb_h1, zb_h2
from fleetpipe.schedules.garbage import collector_paused
from fleetpipe.schedules.placement import Placement, check_count
from fleetpipe.schedules.schedule import Schedule
from fleetpipe.schedules.search.auto import auto

#: Makes the rows of all ranks from a placement, m, and options of its own given by keyword. One
#: that chooses the placement itself makes a schedule.
Generator = Callable[..., Union[Schedule, Sequence[Sequence[Item]]]]


class Family(NamedTuple):
    """A schedule that :func:`build` makes.

    Args:
        rows: Makes the rows of all ranks.
        aliases: Other names for it.
        placement: Its placement.
        chunks: Chunks on a rank where the caller names none.
        most_chunks: Most chunks on a rank; None where there is no limit.
        interleaved: The schedule that is meant where a rank has several chunks; empty for itself.
    """

    rows: Generator
    aliases: tuple[str, ...] = ()
    placement: str = "loop"
    chunks: int = 1
    most_chunks: int | None = 1
    interleaved: str = ""


FAMILIES: dict[str, Family] = {
    "FThenB": Family(f_then_b, ("F-then-B", "GPipe", "AFAB"), most_chunks=None),
    "1F1B": Family(one_f_one_b, interleaved="Interleaved1F1B"),
    "Eager1F1B": Family(eager_one_f_one_b),
    "Interleaved1F1B": Family(interleaved_one_f_one_b, ("VPP",), chunks=2, most_chunks=None),
    "ZBH1": Family(zb_h1, ("InterleavedZeroBubble",), most_chunks=None),
    "ZBH2": Family(zb_h2),
    "ZBV": Family(zb_v, ("ZBVPP",), "vee", 2, 2),
    "VHalf": Family(v_half, (), "vee", 2, 2),
    "VMin": Family(v_min, (), "vee", 2, 2),
    "DualPipeV": Family(dual_pipe_v, (), "vee", 2, 2),
    "auto": Family(auto, most_chunks=None),
}


def names() -> tuple[str, ...]:
    """Returns the names that :func:`build` knows, without aliases."""
    return tuple(FAMILIES)


def canonical_name(name: str) -> str:
    """Returns the name in the table for ``name``: case, ``-``, ``_`` and spaces do not count.

    Raises:
        ConfigError: No such schedule; the message names the nearest ones.
    """
    known = {
        _plain(spelling): canonical
        for canonical, family in FAMILIES.items()
        for spelling in (canonical, *family.aliases)
    }
    try:
        return known[_plain(name)]
    except KeyError:
        spellings = [s for key, family in FAMILIES.items() for s in (key, *family.aliases)]
        raise ConfigError(
            f"there is no schedule {name!r}",
            fix=nearest(name, spellings),
        ) from None


def build(
    name: str, *, ranks: int, micro_batches: int, chunks: int | None = None, **options: object
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
    if chunks is not None and chunks != 1:
        canonical = FAMILIES[canonical].interleaved or canonical
    family = FAMILIES[canonical]
    check_count("micro_batches", micro_batches)
    placement = Placement(family.placement, ranks, family.chunks if chunks is None else chunks)
    _check_chunks(canonical, family, placement.chunks)
    _check_options(canonical, family, options)
    with collector_paused():
        made = family.rows(placement, micro_batches, **options)
        if isinstance(made, Schedule):
            return made
        rows = tuple(map(tuple, made))
    return Schedule(canonical, placement, micro_batches, rows)


def _check_chunks(name: str, family: Family, chunks: int) -> None:
    most = family.most_chunks
    if most is not None and chunks > most:
        raise ConfigError(
            f"{name} cannot place {chunks} chunks on a rank",
            expected=f"chunks={most}",
            got=f"chunks={chunks}",
        )


def _check_options(name: str, family: Family, options: Iterable[str]) -> None:
    known = list(inspect.signature(family.rows).parameters)[2:]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{name} has no option {option!r}",
                fix=nearest(option, known) if known else "leave it out",
            )


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()
