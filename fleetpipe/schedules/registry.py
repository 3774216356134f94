"""Builds schedules by name: those of the families, and users' own, which it registers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleetpipe.errors import ConfigError, ScheduleError, nearest, require_whole
from fleetpipe.schedules.action import Action, Fused
from fleetpipe.schedules.api import Schedule
from fleetpipe.schedules.check import verify
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.families import table
from fleetpipe.schedules.placement import SHAPES, Edge, Placement
from fleetpipe.schedules.rows import ScheduleRows, option_names_of

#: Names of earlier versions, and what to do without each.
_REMOVED = {
    "auto": "`auto` was removed: run `fleetpipe plan`, or choose by docs/schedules/choosing.md"
}


def names() -> tuple[str, ...]:
    """Returns the names of all schedules that :func:`build` builds, without aliases."""
    return tuple(table.FAMILIES)


def canonical_name(name: str) -> str:
    """Returns the name of a schedule as :func:`names` spells it.

    Args:
        name: The name or an alias. Case, ``-``, ``_`` and spaces do not count, and neither does a
            leading "Schedule", as in torch's ``Schedule1F1B``.

    Raises:
        ConfigError: No such schedule; the message names the nearest ones.
    """
    names_by_spelling = {
        _normalize(spelling): canonical for spelling, canonical in _names_and_aliases()
    }
    normalized = _normalize(name)
    try:
        return (
            names_by_spelling.get(normalized)
            or names_by_spelling[normalized.removeprefix("schedule")]
        )
    except KeyError:
        raise ConfigError(
            f"there is no schedule {name!r}",
            fix=_REMOVED.get(normalized)
            or nearest(name, [spelling for spelling, _ in _names_and_aliases()]),
        ) from None


def default_chunks(name: str) -> int:
    """Returns the number of chunks on a rank that a schedule has by default.

    Args:
        name: The schedule's canonical name.
    """
    return table.FAMILIES[name].chunks


def register(
    name: str,
    rows: table.Rows,
    *,
    aliases: Sequence[str] = (),
    placement: str = "loop",
    chunks: int | None = None,
    any_chunks: bool = False,
) -> None:
    """Registers a user's schedule under a name that :func:`build` and strategies accept.

    The rows that the function returns are verified each time. In a job every rank has to register
    it, before ``fleet.init``. A user's name may be registered again, and then means the new
    function.

    Args:
        name: The name, one word; case, ``-``, ``_`` and spaces do not count when it is looked up.
        rows: A function of a :class:`Placement` and m that returns for each rank the
            :class:`Action` (or :class:`Fused`) values in the order in which it runs them. Further
            parameters are options of :func:`build`. It raises ConfigError for numbers that it does
            not take.
        aliases: Other names for it.
        placement: "loop", "vee" or "wave".
        chunks: Default number of chunks on a rank; None means 1, or 2 on a vee or a wave.
        any_chunks: Whether it takes any other number of chunks too.

    Raises:
        ConfigError: A name or alias that another schedule has, a name of several words, or an
            unknown placement.

    Example:
        >>> def one_by_one(placement, micro_batches):
        ...     return [
        ...         [Action(kind, rank, k) for k in range(micro_batches) for kind in "FB"]
        ...         for rank in range(placement.ranks)
        ...     ]
        >>> register("OneByOne", one_by_one)
        >>> build("one-by-one", ranks=2, micro_batches=4).simulate().makespan
        24
    """
    if name.split() != [name] or not callable(rows):
        raise ConfigError(
            "a schedule is registered with a name of one word and a function",
            got=f"register({name!r}, {rows!r})",
            fix='register("my-schedule", rows), where rows is a function',
        )
    replaced = name in table.FAMILIES and table.FAMILIES[name].registered
    wanted = {_normalize(spelling) for spelling in (name, *aliases)}
    for spelling, other in _names_and_aliases():
        if _normalize(spelling) in wanted and not (replaced and other == name):
            raise ConfigError(
                f"there is a schedule {spelling!r} already",
                got=f"register({name!r}, ..)",
                fix="choose another name",
            )
    if chunks is None:
        chunks = SHAPES[placement].chunks if placement in SHAPES else 1
    Placement(placement, 1, chunks)  # raises ConfigError for an invalid pair
    most = None if any_chunks else chunks
    table.FAMILIES[name] = table.Family(
        _with_verification(name, rows), tuple(aliases), placement, chunks, most, registered=True
    )


def _with_verification(name: str, rows: table.Rows) -> table.Rows:
    """Returns the function ``rows`` of a user's schedule with a check of the rows it returns."""

    @functools.wraps(rows)
    def verify_rows(placement: Placement, micro_batches: int, **options: object) -> Any:
        """Returns the rows of the user's function, after they are verified."""
        returned_rows = tuple(map(tuple, rows(placement, micro_batches, **options)))
        for rank, row in enumerate(returned_rows):
            for entry in row:
                if not isinstance(entry, (Action, Fused)):
                    raise ScheduleError(
                        f"{name} made an entry that is no action",
                        where=f"rank {rank}",
                        expected="Action or Fused values",
                        got=repr(entry),
                        fix="let the function return rows of Action and Fused values",
                    )
        try:
            verify(ScheduleRows(name, placement, micro_batches, returned_rows))
        except ScheduleError as error:
            raise ScheduleError(f"{name} made no valid schedule: {error}") from error
        return returned_rows

    return verify_rows


def build(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    head: bool = False,
    **options: Any,
) -> Schedule:
    """Builds a schedule by name. Verifies nothing but the rows of a user's schedule.

    Args:
        name: One of :func:`names`, or an alias. Case, ``-``, ``_`` and spaces do not count.
            "1F1B" with several chunks means "Interleaved1F1B".
        ranks: Ranks of the pipeline, p.
        micro_batches: Micro-batches of a batch, m; any number, also fewer than ranks.
        chunks: Model parts that each rank owns, v; None means the schedule's own default: 2 for
            Interleaved1F1B, on a vee and a wave, else 1.
        head: Whether the model has a vocabulary head: with S = p stages before it, stage S+r is the
            part of rank r, and stage S+p the loss. Only for schedules with one stage on each rank.
        **options: Options of that schedule: ``groups`` and ``warmup_slack`` of Interleaved1F1B,
            ``groups`` of kFkB, ``slices`` of Seq1F1B.

    Raises:
        ConfigError: An unknown name or option, or numbers that the schedule does not take.
        ScheduleError: A registered function returned an invalid schedule.

    Example:
        >>> build("1F1B", ranks=4, micro_batches=8).simulate().bubble
        9
    """
    canonical = canonical_name(name)
    micro_batches = require_whole("micro_batches", micro_batches)
    schedule = Schedule.of(
        table.schedule_rows(canonical, ranks, micro_batches, chunks, options, head)
    )
    if schedule.name == "Interleaved1F1B" and options.get("groups") is not None:
        try:
            verify(schedule)
        except ScheduleError as error:
            from fleetpipe.schedules.families.one_f_one_b import balanced_groups

            raise ConfigError(
                f"`groups` {list(options['groups'])} deadlock",
                got=str(error),
                cause="the warm-up fits the first group, so a larger one comes too late; and a"
                f" group of fewer than {ranks} micro-batches can leave the ranks without work",
                fix=f"groups={balanced_groups(schedule.placement.ranks, micro_batches)}",
            ) from error
    return schedule


def rebuild(schedule: Schedule, micro_batches: int) -> Schedule:
    """Builds a schedule with the same options for another number of micro-batches.

    Args:
        schedule: A schedule from :func:`build`, or its text form.
        micro_batches: Micro-batches of a batch, m.

    Raises:
        ConfigError: A schedule with an unknown name, or options that do not fit that number.
        ScheduleError: A registered function returned an invalid schedule.

    Example:
        >>> rebuild(build("kFkB", ranks=2, micro_batches=8, groups=[4]), 2).options
        (('groups', (4,)),)
    """
    options = dict(schedule.options)
    if schedule.slices > 1:
        options["slices"] = schedule.slices
    return build(
        schedule.name,
        ranks=schedule.placement.ranks,
        micro_batches=micro_batches,
        chunks=schedule.placement.chunks,
        head=schedule.placement.has_head,
        **options,
    )


def option_names() -> frozenset[str]:
    """Returns the names of the options of all schedules together, users' own included."""
    families = table.FAMILIES.values()
    return frozenset(name for family in families for name in option_names_of(family.rows))


def _names_and_aliases() -> Iterator[tuple[str, str]]:
    """Yields each name and each alias of all schedules, with the canonical name."""
    for name, family in table.FAMILIES.items():
        for spelling in (name, *family.aliases):
            yield spelling, name


def _normalize(name: str) -> str:
    """Returns a name in small letters, without ``-``, ``_`` and spaces."""
    return re.sub(r"[-_\s]", "", name).lower()


def build_verified(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    options: Mapping[str, object] | None = None,
    memory_cap: float | None = None,
    costs: Costs | None = None,
    edges: Iterable[Edge] | None = None,
    head: bool = False,
) -> Schedule:
    """Builds a schedule by name and verifies it, against a memory cap and the model's edges too.

    Args:
        name: The name of the schedule, or an alias.
        ranks: Ranks of the pipeline, p.
        micro_batches: Micro-batches of a batch, m.
        chunks: Model parts of each rank, v; None for the schedule's own default.
        options: Options of the schedule, such as ``groups``, ``warmup_slack`` and ``slices``. None
            as a value means the schedule's default.
        memory_cap: Most that a rank may hold: forwards of one stage and a whole micro-batch, or
            bytes where ``costs`` has bytes. A schedule that exceeds it is refused.
        costs: The memory of the stages; times do not matter here.
        edges: The edges of the model; None for a chain of stages.
        head: Whether the model has a vocabulary head.

    Raises:
        ConfigError: An unknown name or option, or numbers that the schedule does not take.
        ScheduleError: The schedule exceeds the cap, or cannot run on these edges.
    """
    wanted = {option: value for option, value in (options or {}).items() if value is not None}
    schedule = build(
        name, ranks=ranks, micro_batches=micro_batches, chunks=chunks, head=head, **wanted
    )
    schedule.verify(edges, memory_cap=memory_cap, costs=costs)
    return schedule
