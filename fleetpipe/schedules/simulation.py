"""Simulates a schedule: when each action runs, the memory that it holds, and the plan of it.

``replay`` runs the rows of all ranks on paper, each action as soon as its rank and its inputs are
ready, and returns the times. ``simulate`` adds the bubble and the memory in use. ``lower`` writes a
plan in which no two ranks can block each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain as concatenate
from itertools import product, repeat
from typing import NamedTuple, TypeVar

from fleetpipe.schedules.action import (
    KINDS,
    Action,
    Free,
    Item,
    Op,
    Recv,
    Reduce,
    Send,
    Step,
    flatten,
    micro_batch_numbers,
    parts,
)
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.explain import raise_incomplete, raise_stalled
from fleetpipe.schedules.placement import (
    Dependencies,
    Edge,
    checked_edges,
    crossing_edges,
    distance_to_slice_before,
)
from fleetpipe.schedules.rows import PlanRows, ScheduleRows, collector_paused

#: For each micro-batch (or slice) the time at which its action of one kind and stage ended; None
#: before that.
_Ends = list[float | None]

#: The ``append`` of a rank's row, and the operation to append for each micro-batch (or slice).
_Appends = tuple[Callable[[Op], None], Sequence[Op]]

_NewOp = TypeVar("_NewOp", Send, Recv, Free)


@dataclass(frozen=True)
class Replay:
    """The times at which each entry of each rank begins and ends.

    Args:
        starts: For each rank, the time at which each of its entries begins.
        ends: For each rank, the time at which each of its entries ends.
        busy: For each rank, the time that it computes in all.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]


def replay(schedule: ScheduleRows, edges: Iterable[Edge] | None, costs: Costs) -> Replay:
    """Returns the times at which all entries of a schedule begin and end.

    Every rank runs its row in order; an entry begins when its rank is free and its inputs have
    arrived. The result does not depend on the order in which ranks are visited. The last result is
    cached with the schedule, since verify, simulate and lower all need it.

    Args:
        schedule: The schedule.
        edges: The edges of the model; None for a chain of stages.
        costs: The time of each action, and the latency of edges.

    Raises:
        ScheduleError: Ranks wait for each other, or for something later in their own row; or the
            schedule is incomplete.
    """
    # By repr, since costs of 1 and of 1.0 are equal, but only costs of 1 give times as integers.
    key = checked_edges(edges, schedule.placement), repr(asdict(costs))
    cached: tuple[object, Replay] | None = vars(schedule).get("_replay")
    if cached is None:
        _require_complete_schedule(schedule)
    if cached is None or cached[0] != key:
        dependencies = Dependencies(key[0], schedule.placement.stages)
        state = _ReplayState(schedule, dependencies, costs)
        state.run()
        if any(len(ends) < len(row) for ends, row in zip(state.ends, schedule.actions)):
            raise_stalled(schedule, dependencies, list(map(len, state.ends)))
        starts, ends = tuple(map(tuple, state.starts)), tuple(map(tuple, state.ends))
        # The local is returned: another thread may replace the attribute.
        cached = key, Replay(starts, ends, tuple(state.busy))
        vars(schedule)["_replay"] = cached
    return cached[1]


def _require_complete_schedule(schedule: ScheduleRows) -> None:
    """Refuses a schedule with an action that is missing, doubled, unknown, or on a wrong rank."""
    units, placement = schedule.units, schedule.placement
    # The count comes first: the sets below are as large as a complete schedule.
    if sum(1 for row in schedule.actions for _ in flatten(row)) < placement.stages * units:
        raise_incomplete(schedule)
    for rank, row in enumerate(schedule.actions):
        needed = set(product(placement.stages_of(rank), range(units)))
        done: dict[str, set[tuple[int, int]]] = {kind: set() for kind in KINDS}
        actions = 0
        try:
            for kind, stage, micro_batch in flatten(row):
                done[kind].add((stage, micro_batch))
                actions += 1
        except (KeyError, TypeError):  # no such kind, or a number that is none
            raise_incomplete(schedule)
        backwards = set() if schedule.forward_only else needed
        complete = (
            done["F"] == needed
            and done["B"] | done["I"] == backwards
            and done["I"] == done["W"]
            and actions == len(needed) + len(backwards) + len(done["W"])
        )
        if not complete:
            raise_incomplete(schedule)


class _StageActions(NamedTuple):
    """The times of the actions of one kind and stage, and what they wait for.

    Attributes:
        ends: The time at which the action of each micro-batch ended. B and I share the list, since
            either gives the input gradient.
        duration: The time that each action takes.
        waits: For each kind of action that they wait for: the list of its ends, the distance to its
            micro-batch or slice (0, -1 or 1), and the latency of its value.
    """

    ends: _Ends
    duration: float
    waits: list[tuple[_Ends, int, float]]


class _ReplayState:
    """The state of a replay, in which all ranks run their rows.

    Attributes:
        schedule: The schedule whose rows are run.
        costs: The time of each action, and the latency of edges.
        stage_actions: By index of a slice (0 for whole micro-batches), kind and stage: the times of
            these actions, and what they wait for.
        starts: For each rank the times at which its entries began, as far as they have run.
        ends: For each rank the times at which these entries ended.
        busy: For each rank the time that it has computed.
    """

    def __init__(self, schedule: ScheduleRows, dependencies: Dependencies, costs: Costs) -> None:
        """Prepares a replay in which nothing has run yet.

        Args:
            schedule: The schedule.
            dependencies: The rule of what an action waits for.
            costs: The time of each action, and the latency of edges.
        """
        ranks, stages = range(schedule.placement.ranks), range(schedule.placement.stages)
        self.schedule, self.costs = schedule, costs
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]
        self.busy: list[float] = [0 for _ in ranks]
        ends: dict[str, list[_Ends]] = {
            kind: [[None] * schedule.units for _ in stages] for kind in "FBW"
        }
        ends["I"] = ends["B"]
        self.stage_actions = [
            {
                kind: [
                    _StageActions(
                        ends[kind][stage],
                        of_slice.of(kind, stage),
                        _waits(schedule, dependencies, of_slice, ends, (kind, stage, index)),
                    )
                    for stage in stages
                ]
                for kind in KINDS
            }
            for index, of_slice in enumerate(costs.by_slice(schedule.slices))
        ]

    def run(self) -> None:
        """Runs every rank until no rank can go on."""
        runs = [self._run(rank) for rank in range(len(self.ends))]
        # The numbers of entries that had run, before and after each rank went on once.
        before, done = -1, 0
        while done != before:
            for run in runs:
                next(run, None)
            before, done = done, sum(map(len, self.ends))

    def _run(self, rank: int) -> Iterator[None]:
        """Runs the entries of a rank's row; yields whenever an input is not there yet."""
        slices, stage_actions = self.schedule.slices, self.stage_actions
        # The time at which the rank has run all entries so far.
        free: float = 0
        for item in self.schedule.actions[rank]:
            begin, duration = free, 0.0
            actions = parts(item)
            for kind, stage, number in actions:
                _, duration, waits = stage_actions[number % slices][kind][stage]
                for ends, distance, latency in waits:
                    while (end := ends[number + distance]) is None:
                        yield  # other ranks run on, until the input is there
                    begin = max(begin, end + latency)
            if not isinstance(item, Action):
                duration = self.costs.of_fused(item)
            free = begin + duration
            for kind, stage, number in actions:
                stage_actions[number % slices][kind][stage].ends[number] = free
            self.starts[rank].append(begin)
            self.ends[rank].append(free)
            self.busy[rank] += duration


def _waits(
    schedule: ScheduleRows,
    dependencies: Dependencies,
    costs: Costs,
    ends: dict[str, list[_Ends]],
    actions: tuple[str, int, int],
) -> list[tuple[_Ends, int, float]]:
    """Returns what the actions of a kind and stage wait for: ``_StageActions.waits``.

    Args:
        schedule: The schedule.
        dependencies: The rule of what an action waits for.
        costs: The costs of the actions, of which the latency of edges is read.
        ends: The lists of ends, by kind and stage.
        actions: Kind, stage and index of the slice of the actions that wait.
    """
    (kind, stage, index), rank_of = actions, schedule.placement.rank_of
    waits = [
        # A value and its gradient use one edge, whose latency is that of the earlier stage.
        (
            ends[other_kind][other],
            0,
            costs.comm_of(min(stage, other)) if rank_of(other) != rank_of(stage) else 0,
        )
        for other_kind, other in dependencies.of(kind, stage)
    ]
    away = distance_to_slice_before(kind, index, schedule.slices)
    return [*waits, (ends[kind][stage], away, 0)] if away else waits


class Amounts(NamedTuple):
    """The activations in flight on a rank, in forwards of one stage or in bytes.

    Attributes:
        during: While one entry of its row runs, before it releases anything.
        after: When that entry has ended.
    """

    during: float
    after: float


def amounts_in_flight(
    schedule: ScheduleRows, rank: int, costs: Costs | None = None, *, in_bytes: bool = False
) -> Iterator[Amounts]:
    """Yields for each entry of a rank's row the activations in flight.

    Activations of a forward are in flight from its start. B releases them at its end; in a split
    backward I releases the share ``costs.input_grad_frees`` of them, and W the rest. In a
    forward-only schedule the forward itself releases them at its end.

    Args:
        schedule: A schedule.
        rank: The rank.
        costs: The share that I releases, and the bytes of each stage. Default ``Costs()``.
        in_bytes: Whether to count the bytes ``costs.bytes``, in place of forwards of one stage.
    """
    costs = costs or Costs()
    rest = 1 - costs.input_grad_frees
    by_slice = costs.by_slice(schedule.slices)
    slices = schedule.slices

    def bytes_held(action: Action) -> float:
        return by_slice[action.micro_batch % slices].bytes_of(action)

    # Forwards of which nothing is released, and those of which only I has run. They have separate
    # sums, which are weighted last, so that no rounding error builds up.
    whole: float = 0
    halves: float = 0
    for item in schedule.actions[rank]:
        actions = (item,) if isinstance(item, Action) else item.actions
        for action in actions:
            if action[0] == "F":
                whole += bytes_held(action) if in_bytes else 1
        during = whole + rest * halves
        for action in actions:
            kind = action[0]
            amount = bytes_held(action) if in_bytes else 1
            if kind == "B" or kind == "I" or schedule.forward_only:
                whole -= amount
            if kind == "I":
                halves += amount
            elif kind == "W":
                halves -= amount
        yield Amounts(during, whole + rest * halves)


@dataclass(frozen=True, repr=False)
class Timeline:
    """The result of a simulation. Times are in the unit of the costs.

    Args:
        schedule: The schedule that was simulated.
        costs: What its actions cost.
        starts: For each rank, the time at which each of its entries begins.
        ends: For each rank, the time at which each of its entries ends.
        makespan: The time from 0 to the end of the last action of any rank.
        spans: For each rank the time from the start of its first action to the end of its last.
        busy: The most time that any rank computes.
        peak_activations: For each rank, the most forwards whose activations are in flight at once,
            in forwards of one stage.
        peak_bytes: The same in bytes, if the costs give them; else None.
    """

    schedule: ScheduleRows
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    spans: tuple[float, ...]
    busy: float
    peak_activations: tuple[float, ...]
    peak_bytes: tuple[float, ...] | None

    @property
    def span(self) -> float:
        """Longest time that a rank takes from its first action to its last."""
        return max(self.spans)

    @property
    def bubble(self) -> float:
        """Time lost: span - busy."""
        return self.span - self.busy

    @property
    def bubble_rate(self) -> float:
        """Share of the span that is lost, 0..1."""
        return self.bubble / self.span if self.span else 0.0

    @property
    def events(self) -> tuple[tuple[tuple[Item, float, float], ...], ...]:
        """For each rank, its entries as (action or fused unit, start, end)."""
        rows = zip(self.schedule.actions, self.starts, self.ends)
        return tuple(tuple(zip(row, starts, ends)) for row, starts, ends in rows)

    def exchange_in(self, item: Item) -> float:
        """Returns the seconds of an entry in which its rank only waits for an exchange."""
        if not self.costs.exchange:
            return 0
        slices = self.schedule.slices
        return self.costs.by_slice(slices)[parts(item)[0].micro_batch % slices].exchange_in(item)

    def __repr__(self) -> str:
        return (
            f"<Timeline of {self.schedule.name}: span {self.span:g}, bubble {self.bubble:g}"
            f" ({self.bubble_rate:.2%})>"
        )


def simulate(
    schedule: ScheduleRows, costs: Costs | None = None, edges: Iterable[Edge] | None = None
) -> Timeline:
    """Returns when each action of a schedule begins and ends, with the bubble and the memory."""
    placement = schedule.placement
    costs = (costs or Costs()).without_loss(placement)
    costs.check_stages(placement.stages)
    times = replay(schedule, edges, costs)

    def peaks(in_bytes: bool) -> tuple[float, ...]:
        """Returns for each rank the most activations in flight at once."""
        return tuple(
            max(each.during for each in amounts_in_flight(schedule, rank, costs, in_bytes=in_bytes))
            for rank in range(placement.ranks)
        )

    spans = tuple(ends[-1] - starts[0] for starts, ends in zip(times.starts, times.ends))
    return Timeline(
        schedule,
        costs,
        times.starts,
        times.ends,
        makespan=max(ends[-1] for ends in times.ends),
        spans=spans,
        busy=max(times.busy),
        peak_activations=peaks(in_bytes=False),
        peak_bytes=None if costs.bytes is None else peaks(in_bytes=True),
    )


def lower(schedule: ScheduleRows, edges: Iterable[Edge] | None = None) -> PlanRows:
    """Returns the plan of a schedule: its actions with sends, receives and releases put in.

    All entries of all ranks are put into one linear order, that of their simulated ends, and every
    transfer is written into both its ranks' rows at one place of that order. So all rows follow one
    order, and sends and receives that wait for each other never form a cycle.
    """
    placement = schedule.placement
    ends = replay(schedule, edges, Costs()).ends
    ordered_edges = checked_edges(edges, placement)
    times = list(concatenate.from_iterable(ends))
    owners = [rank for rank, row in enumerate(ends) for _ in row]
    items = [iter(row) for row in schedule.actions]
    with collector_paused():
        writer = _PlanWriter(schedule, ordered_edges)
        following = writer.following
        appends = [row.append for row in writer.rows]
        # The sort is stable: a rank's own order stays, and of equal times the lower rank is first.
        for index in sorted(range(len(times)), key=times.__getitem__):
            rank = owners[index]
            item = next(items[rank])
            appends[rank](item)
            for kind, stage, micro_batch in (item,) if isinstance(item, Action) else item.actions:
                for append, ops in following[kind][stage]:
                    append(ops[micro_batch])
    if not schedule.forward_only:
        for row in writer.rows:
            row += (Reduce(), Step())
    return PlanRows(
        schedule.name,
        placement,
        schedule.micro_batches,
        ordered_edges,
        tuple(map(tuple, writer.rows)),
        schedule.forward_only,
        schedule.slices,
        schedule.options,
    )


class _PlanWriter:
    """The rows of a plan that is being written, and the operations that follow each action.

    Operations are created for all micro-batches at once, since creating millions of them one by one
    would take most of the time.

    Attributes:
        numbers: The numbers of all micro-batches, or of their slices.
        rows: The rows of all ranks, as far as they are written.
        following: By kind and stage of an action: the sends, receives and releases to append after
            it, each with the row to append them to.
    """

    def __init__(self, schedule: ScheduleRows, edges: Sequence[Edge]) -> None:
        """Creates empty rows, and all operations that will follow the actions of ``schedule``."""
        placement = schedule.placement
        self.numbers = micro_batch_numbers(schedule.micro_batches, schedule.slices)
        self.rows: list[list[Op]] = [[] for _ in range(placement.ranks)]
        leaving, entering = crossing_edges(placement, edges)
        self.following: dict[str, list[list[_Appends]]] = {kind: [] for kind in KINDS}
        for stage in range(placement.stages):
            row = self.rows[placement.rank_of(stage)]
            values = [
                appends
                for edge_and_receiver in leaving[stage]
                for appends in self._send_and_receive("F", row, edge_and_receiver)
            ]
            frees: list[_Appends] = [
                (row.append, self._one_per_micro_batch(Free, stage, letter="FREE"))
            ]
            grads: list[_Appends] = []
            if not schedule.forward_only:
                # The gradient of an edge goes to the rank that sent its value.
                for edge_and_receiver in entering[stage]:
                    grads += self._send_and_receive("B", row, edge_and_receiver)
            self.following["F"].append(values + frees * schedule.forward_only)
            self.following["B"].append(grads + frees)
            self.following["I"].append(grads)
            self.following["W"].append(frees)

    def _send_and_receive(
        self, kind: str, row: list[Op], edge_and_receiver: tuple[Edge, int]
    ) -> list[_Appends]:
        """Returns the sends of an edge's values or gradients, and the receives at the other rank.

        ``kind`` is "F" for values and "B" for gradients; ``row`` is that of the sending rank.

        The result is a pair for the row of the sending rank, and one for that of the receiving
        rank: the row's ``append``, and the operation to append for each micro-batch, after the
        action that computes what is sent.
        """
        edge, receiver = edge_and_receiver
        return [
            (row.append, self._one_per_micro_batch(Send, kind, edge, letter="S")),
            (self.rows[receiver].append, self._one_per_micro_batch(Recv, kind, edge, letter="R")),
        ]

    def _one_per_micro_batch(
        self, written: type[_NewOp], *first: object, letter: str
    ) -> Sequence[_NewOp]:
        """Returns one operation for each micro-batch or slice, without a Python call for each.

        Args:
            written: The class of the operations.
            first: The fields before the micro-batch, such as kind and edge.
            letter: The last field: the operation's name in texts, such as "S" for a send.
        """
        fields = zip(*map(repeat, first), self.numbers, repeat(letter))
        return list(map(partial(tuple.__new__, written), fields))
