"""The table of the families of schedules: the function that builds the rows of each, and its shape.

The module of a family is loaded when a schedule of it is built, or when its options are asked for.
To the rows of some families the actions of a vocabulary head can be added: each rank has one part
of it as a stage of its own, after the stages of the body (the model without its head).

1F1B on two ranks, four micro-batches, a part as long as a stage. Small letters are of the head: of
rank 0 stage 2, of rank 1 stage 3. Stage 4, the loss, stands between f and b and takes no time::

    rank 0  F0 F1 f0 F2 b0--- F3 f1 f2 b1--- b2--- .  .  B0--- f3 .  B1--- b3--- B2--- B3---
    rank 1  .  F0 f0 b0--- F1 f1 F2 b1--- f2 b2--- B0--- F3 f3 B1--- b3--- B2--- B3--- .  .
"""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError, nearest, require_whole
from fleetpipe.schedules.action import Action, Item, parts
from fleetpipe.schedules.placement import HEAD, Dependencies, Edge, Placement
from fleetpipe.schedules.rows import (
    ScheduleRows,
    collector_paused,
    option_names_of,
    options_to_store,
)

#: Forwards by which the warm-up of each rank is longer with a head. The body takes its rows from a
#: pipeline with as many ranks more, since between the last stage's F and B a micro-batch goes to
#: all ranks and back, twice (arXiv:2411.05288).
EXTRA_FORWARDS = 2

#: The time of each kind of action of a stage when a head is added, and the shares of it that a part
#: of the head and the loss take. Longer parts give the same order, since a head's actions come
#: before the body's; shorter ones do not.
_NOMINAL_TIMES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_PART_OF_STAGE, _LOSS_OF_STAGE = 0.2, 0.01

#: Returns the rows of all ranks, given a placement, m, and its own options by keyword.
Rows = Callable[..., Sequence[Sequence[Item]]]

#: The schedule that runs slices of sequences.
SLICED = "Seq1F1B"


def with_head(
    body: Sequence[Sequence[Item]], placement: Placement, micro_batches: int
) -> list[list[Item]]:
    """Returns the rows of a model's body with the actions of its vocabulary head added.

    The actions of the body keep their order. Those of a part of the head run as soon as their
    inputs are there and their rank is free, so they fill its bubbles first.

    Args:
        body: The rows of the body, which wait for each other along a chain of stages.
        placement: The placement of body and head.
        micro_batches: Micro-batches of a batch, m.
    """
    return _HeadMerge(body, placement, micro_batches).rows()


class _HeadMerge:
    """Merges the actions of a head into the rows of a body, by a simulation of all ranks.

    Attributes:
        dependencies: The rule of what an action waits for.
        lengths: For each stage its nominal time, as a multiple of that of a stage of the body.
        clock: For each rank the time at which its last action ended.
        ends: By kind (B for I too), stage and micro-batch, the time at which an action ended.
        queues: For each rank its actions that have not run, in several queues. A queue keeps its
            order; of two queues whose first actions could begin at one time, the first one goes on.
    """

    def __init__(
        self, body: Sequence[Sequence[Item]], placement: Placement, micro_batches: int
    ) -> None:
        edges = [Edge(*ends) for ends in placement.chain()]
        self.dependencies = Dependencies(edges, placement.stages)
        self.lengths = (
            [1.0] * placement.body + [_PART_OF_STAGE] * placement.ranks + [_LOSS_OF_STAGE]
        )
        self.clock = [0.0] * placement.ranks
        self.ends: dict[tuple[str, int, int], float] = {}
        self.queues: list[list[deque[Item]]] = []
        for rank, row in enumerate(body):
            head = [stage for stage in placement.stages_of(rank) if stage >= placement.body][::-1]
            kinds = [(kind, stage) for kind in "BF" for stage in head]
            rows = [*([Action(*kind, k) for k in range(micro_batches)] for kind in kinds), row]
            self.queues.append([deque[Item](items) for items in rows])

    def rows(self) -> list[list[Item]]:
        """Runs all actions, always one that can begin first; returns the rows of all ranks."""
        rows: list[list[Item]] = [[] for _ in self.queues]
        while possible := [
            (start, number, rank)
            for rank, queues in enumerate(self.queues)
            for number, queue in enumerate(queues)
            if queue and (start := self._start(rank, queue[0])) < math.inf
        ]:
            start, number, rank = min(possible)
            item = self.queues[rank][number].popleft()
            rows[rank].append(item)
            self._run(rank, item, start)
        return rows

    def _start(self, rank: int, item: Item) -> float:
        """Returns when a rank could begin an entry; infinity if an input has not been computed."""
        inputs = [
            self.ends.get((kind, stage, action.micro_batch), math.inf)
            for action in parts(item)
            for kind, stage in self.dependencies.of(action.kind, action.stage)
        ]
        return max([self.clock[rank], *inputs])

    def _run(self, rank: int, item: Item, start: float) -> None:
        """Records when a rank ends an entry that begins at ``start``."""
        actions = parts(item)
        times = [_NOMINAL_TIMES[action.kind] * self.lengths[action.stage] for action in actions]
        self.clock[rank] = start + sum(times)
        for kind, stage, micro_batch in actions:
            self.ends["B" if kind == "I" else kind, stage, micro_batch] = self.clock[rank]


class Family(NamedTuple):
    """A family of schedules: those that one function builds, from sizes and options.

    Args:
        function: Builds the rows of all ranks; or its name as ``module:name`` in this package.
        aliases: Other names of the family.
        placement: The shape of its placements: "loop", "vee" or "wave".
        chunks: Default number of chunks on a rank.
        most_chunks: Most chunks on a rank; None if there is no limit.
        interleaved: The name of the family to build in place of this one if a rank has several
            chunks; empty for this one.
        registered: Whether a user registered it.
        sliced: Whether it cuts sequences into slices, as many as its option ``slices`` says.
    """

    function: Rows | str
    aliases: tuple[str, ...] = ()
    placement: str = "loop"
    chunks: int = 1
    most_chunks: int | None = 1
    interleaved: str = ""
    registered: bool = False
    sliced: bool = False

    @property
    def rows(self) -> Rows:
        """The function that builds the rows of all ranks; loads its module."""
        if isinstance(self.function, str):
            named: Rows = pkgutil.resolve_name(f"{__package__}.{self.function}")
            return named
        return self.function


FAMILIES: dict[str, Family] = {
    "FThenB": Family("one_f_one_b:f_then_b", ("F-then-B", "GPipe", "AFAB"), most_chunks=None),
    "1F1B": Family("one_f_one_b:one_f_one_b", interleaved="Interleaved1F1B"),
    "Eager1F1B": Family("one_f_one_b:eager_one_f_one_b"),
    "kFkB": Family("one_f_one_b:k_f_k_b", ("Ada-Grouper",)),
    "Interleaved1F1B": Family(
        "one_f_one_b:interleaved_one_f_one_b", ("VPP",), chunks=2, most_chunks=None
    ),
    "ZBH1": Family("zero_bubble:zb_h1", ("InterleavedZeroBubble",), most_chunks=None),
    "ZBH2": Family("zero_bubble:zb_h2"),
    "ZBV": Family("zero_bubble:zb_v", ("ZBVPP", "ZBVZeroBubble"), "vee", 2, 2),
    "VHalf": Family("zero_bubble:v_half", (), "vee", 2, 2),
    "VMin": Family("zero_bubble:v_min", (), "vee", 2, 2),
    "DualPipeV": Family("wave:dual_pipe_v", (), "vee", 2, 2),
    SLICED: Family("one_f_one_b:seq_one_f_one_b", sliced=True),
    "Hanayo": Family("wave:hanayo", ("Wave",), "wave", 2, None),
}


def schedule_rows(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None,
    options: Mapping[str, object],
    head: bool = False,
) -> ScheduleRows:
    """Returns the schedule of a family, or for several chunks of its interleaved family.

    Args:
        name: A key of the table.
        ranks: Ranks of the pipeline, p.
        micro_batches: Micro-batches of a batch, m.
        chunks: Chunks on a rank; None means the family's default.
        options: Options of the family.
        head: Whether the model has a vocabulary head.

    Raises:
        ConfigError: An unknown option, numbers that the family does not take, or a head that it
            does not take.
    """
    if chunks is not None and chunks != 1:
        name = FAMILIES[name].interleaved or name
    family = FAMILIES[name]
    placement = Placement(family.placement, ranks, family.chunks if chunks is None else chunks)
    if family.most_chunks is not None and placement.chunks > family.most_chunks:
        raise ConfigError(
            f"{name} cannot place {chunks} chunks on a rank",
            expected=f"chunks={family.most_chunks}",
            got=f"chunks={chunks}",
            fix=f"give chunks={family.most_chunks}, or leave it out",
        )
    require_options(name, family.rows, options)
    slices = slices_of(name, options)
    require_whole("slices", slices)
    # Slices are stored in a field of the schedule, not with its options.
    family_options = {option: value for option, value in options.items() if option != "slices"}
    stored = options_to_store(name, family.rows, family_options if family.sliced else options)
    if head:
        _require_head_allowed(name, placement)
        longer = Placement(family.placement, ranks + EXTRA_FORWARDS)
        placement = Placement(family.placement + HEAD, ranks)
        body = family.rows(longer, micro_batches, **options)[:ranks]
        rows = tuple(map(tuple, with_head(body, placement, micro_batches)))
        return ScheduleRows(name, placement, micro_batches, rows, options=stored)
    with collector_paused():
        rows = tuple(map(tuple, family.rows(placement, micro_batches, **options)))
    return ScheduleRows(name, placement, micro_batches, rows, slices=slices, options=stored)


def families_with_head() -> list[str]:
    """Returns the names of the families to whose schedules a vocabulary head can be added.

    They have one stage on each rank of a loop, cut no sequences, and are not a user's.
    """
    return [
        name
        for name, family in FAMILIES.items()
        if family.placement == "loop"
        and family.chunks == 1
        and not (family.sliced or family.registered)
    ]


def _require_head_allowed(name: str, placement: Placement) -> None:
    """Raises ConfigError if no head can be added to a family's schedule on a placement."""
    if name not in families_with_head() or placement.chunks > 1:
        raise ConfigError(
            f"{name} cannot place the parts of a vocabulary head",
            expected=f"one of {', '.join(families_with_head())}, with one chunk on each rank",
            got=f"{name} with chunks={placement.chunks}",
            fix="choose one of these, or describe the head as a layer like the others",
        )


def slices_of(name: str, options: Mapping[str, object]) -> Any:
    """Returns the number of slices of each micro-batch that a family makes with some options.

    Args:
        name: A key of the table.
        options: Options of the family; a missing ``slices`` means its default.

    Returns:
        1 for a family that cuts no sequences; else the value of ``slices``, unchecked.
    """
    if not FAMILIES[name].sliced:
        return 1
    default = inspect.signature(FAMILIES[name].rows).parameters["slices"].default
    return options.get("slices", default)


def require_options(name: str, rows: Callable[..., object], options: Iterable[str]) -> None:
    """Raises ConfigError for the first of some options that a schedule does not have.

    Args:
        name: The schedule, for the error.
        rows: The function that builds its rows, whose parameters are its options.
        options: The names of the options to check.
    """
    names = option_names_of(rows)
    for option in options:
        if option not in names:
            raise ConfigError(
                f"{name} has no option {option!r}",
                fix=nearest(option, names) if names else "leave it out",
            )
