"""Events (operations with their times, simulated or measured), and traces in Chrome's format.

A track of a trace is a set of events under one name, such as "measured". Pictures are drawn from
events too. Perfetto (ui.perfetto.dev) and chrome://tracing open a trace.
"""

from __future__ import annotations

import json
from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from fleetpipe.schedules.action import Action, Fused, Item, Op, Recv, Send, flatten, parse_op, parts
from fleetpipe.schedules.placement import Edge, Placement, checked_edges
from fleetpipe.schedules.simulation import Timeline

#: The time in a trace of one unit of the costs, which have no unit of time: a millisecond.
MICROSECONDS_PER_UNIT = 1000.0

#: Microseconds in the second, the unit of measured events.
MICROSECONDS_PER_SECOND = 1e6

#: The category of an action's record in a trace, by kind.
_CATEGORIES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

#: The thread of a rank's actions in a trace. Threads after it have its transfers, several where
#: transfers overlap.
_COMPUTE_THREAD = 1

#: Numbers of steps are below this.
_MOST_STEPS = 1 << 63

#: A JSON object.
_Json = dict[str, object]


class Event(NamedTuple):
    """An operation of a rank and its times, as plain values that can be sent and saved.

    Attributes:
        rank: The rank.
        name: The operation as in a plan: "F0.3", "(F0.3|B1.2)", "SF0>1.3", "STEP"; or any other
            word.
        start: When it began: seconds if measured, else the unit of the costs.
        end: When it ended.
        exchange: The part of that time in which the rank only waited for exchanges with other ranks
            of its stage.
        early: The number of actions that stand before it in its rank's row, but began later.
        queued: The part of that time in which the rank waited for a processor.
    """

    rank: int
    name: str
    start: float
    end: float
    exchange: float = 0.0
    early: int = 0
    queued: float = 0.0

    @property
    def op(self) -> Op | None:
        """The operation that the name denotes, or None if it is not one of a plan."""
        return parse_op(self.name)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of the operation: one, several if they are fused, none in a transfer."""
        op = self.op
        return parts(op) if isinstance(op, (Action, Fused)) else ()


class Figures(NamedTuple):
    """The figures of some events from which their bubble follows.

    Attributes:
        span: Longest time that a rank takes from its first action to its last.
        busy: Most that any rank computes.
    """

    span: float
    busy: float

    @property
    def bubble(self) -> float:
        """Time lost: span - busy."""
        return self.span - self.busy

    @property
    def bubble_rate(self) -> float:
        """Share of the span that is lost, 0..1."""
        return self.bubble / self.span if self.span else 0.0


def events_of(timeline: Timeline) -> list[Event]:
    """Returns the events of a simulated schedule, rank after rank."""
    return [
        Event(rank, str(item), start, end, timeline.exchange_in(item))
        for rank, row in enumerate(timeline.events)
        for item, start, end in row
    ]


def figures_of(events: Iterable[Event]) -> Figures:
    """Returns the span and the busy time of the actions among some events, and so their bubble."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    busy: defaultdict[int, float] = defaultdict(float)
    for event in events:
        if event.actions:
            begins[event.rank] = min(begins.get(event.rank, event.start), event.start)
            ends[event.rank] = max(ends.get(event.rank, event.end), event.end)
            busy[event.rank] += event.end - event.start
    spans = [ends[rank] - begin for rank, begin in begins.items()]
    return Figures(max(spans, default=0), max(busy.values(), default=0))


def with_early(events: Sequence[Event], rows: Sequence[Iterable[Item]]) -> list[Event]:
    """Returns the events of one measured step with :attr:`Event.early` set.

    Args:
        events: The events of the step.
        rows: For each rank the entries of the schedule, in order.
    """
    positions = {
        (rank, str(action)): position
        for rank, row in enumerate(rows)
        for position, action in enumerate(flatten(row))
    }
    # By rank the positions in its row of the actions that began later, ascending.
    began_later: list[list[int]] = [[] for _ in rows]
    marked = [*events]
    for index in sorted(range(len(events)), key=lambda index: -events[index].start):
        event = events[index]
        position = positions.get((event.rank, event.name))
        if position is not None:
            marked[index] = event._replace(early=bisect(began_later[event.rank], position))
            insort(began_later[event.rank], position)
    return marked


def median_step(steps: Sequence[Sequence[Event]]) -> int:
    """Returns the index of the step with the median bubble rate, which no single delay distorts."""
    rates = [figures_of(step).bubble_rate for step in steps]
    return rates.index(median_low(rates))


def write_trace(
    path: str | Path,
    tracks: Mapping[str, Sequence[Event]],
    placement: Placement,
    *,
    edges: Iterable[Edge] | None = None,
    microseconds: Mapping[str, float] | None = None,
    steps: Sequence[int] = (),
    device: str = "",
    machine: _Json | None = None,
) -> None:
    """Writes the result of :func:`chrome_trace` to a file.

    Args:
        path: The file.
        tracks: Events under a name each, such as "predicted" and "measured".
        placement: Which rank owns which stage.
        edges: Values that pass between stages.
        microseconds: For each track the microseconds in one unit of its times.
        steps: The numbers of the measured steps.
        device: The device that the steps ran on.
        machine: Facts about the machine, which are added under ``otherData``.
    """
    document = chrome_trace(
        tracks, placement, edges=edges, microseconds=microseconds, steps=steps, device=device
    )
    document["otherData"] = {**document["otherData"], **({"machine": machine} if machine else {})}
    Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")


def chrome_trace(
    tracks: Mapping[str, Sequence[Event]],
    placement: Placement,
    *,
    edges: Iterable[Edge] | None = None,
    microseconds: Mapping[str, float] | None = None,
    steps: Sequence[int] = (),
    device: str = "",
) -> dict[str, Any]:
    """Returns events in the Trace Event Format: a process for each rank, an "X" for each event.

    Args:
        tracks: Events under a name each, "predicted" and "measured" for example. With several, the
            ranks of all tracks are next to each other: "rank 0 predicted", "rank 0 measured".
        placement: Which rank owns which stage.
        edges: Values that pass between stages, drawn as arrows; None means the chain. If a track
            has transfers, the arrows join those.
        microseconds: For each track the microseconds in one unit of its times; by default 1000,
            which suits simulated ones. Measured ones, in seconds, take 1e6.
        steps: The numbers of the measured steps in their run, in order.
        device: The device that the steps ran on, ``"cpu"`` or ``"gpu"``.

    Returns:
        A value for :func:`json.dumps`.
    """
    scales = {name: (microseconds or {}).get(name, MICROSECONDS_PER_UNIT) for name in tracks}
    values = checked_edges(edges, placement)
    records: list[_Json] = []
    for index, (name, events) in enumerate(tracks.items()):
        pids = [1 + rank * len(tracks) + index for rank in range(placement.ranks)]
        track = _TrackWriter(placement, pids, scales[name])
        label = f" {name}" if len(tracks) > 1 else ""
        records += track.names(label, events)
        records += track.slices(events)
        records += track.arrows(f"{name} ", events, values)
    other: _Json = {
        name: f"1 unit of time = {scale:g} microseconds" for name, scale in scales.items()
    }
    if steps:
        other["steps"] = [*steps]
    if device:
        other["device"] = device
    return {"traceEvents": records, "displayTimeUnit": "ms", "otherData": other}


def tracks_of(document: Any) -> dict[str, list[Event]]:
    """Returns the events of each track by its name, in seconds; a single track has the name "".

    Raises:
        LookupError, TypeError, ValueError, AttributeError: ``document`` is no such trace.
    """
    entries = document["traceEvents"]
    names = {
        entry["pid"]: str(entry["args"]["name"]).split()
        for entry in entries
        if entry["name"] == "process_name"
    }
    tracks: defaultdict[str, list[Event]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            _, rank, *track = names[entry["pid"]]
            start, seconds = _seconds(entry["ts"]), _seconds(entry["dur"])
            early = entry.get("args", {}).get("early", 0)
            if type(early) is not int or int(rank) < 0:
                raise ValueError(f"{early} early actions on rank {rank}")
            queued = min(seconds, max(0.0, _seconds(entry.get("args", {}).get("queued", 0))))
            times = start, start + seconds
            event = Event(int(rank), str(entry["name"]), *times, early=early, queued=queued)
            tracks[" ".join(track)].append(event)
    return tracks


def _seconds(microseconds: Any) -> float:
    """Converts a trace's time to seconds; raises ValueError or TypeError if it is no number."""
    if not abs(microseconds) < 1e18:
        raise ValueError(f"{microseconds} is no time")
    return float(microseconds / MICROSECONDS_PER_SECOND)


def steps_of(document: Mapping[str, Any], count: int, first: int = 1) -> Sequence[int]:
    """Returns the numbers of a trace's measured steps, counted from the beginning of the run.

    Args:
        document: The trace.
        count: How many steps it has.
        first: The number of the first step, if the trace does not say the numbers.
    """
    other = document.get("otherData")
    numbers = other.get("steps") if isinstance(other, dict) else None
    if isinstance(numbers, list) and len(numbers) == count:
        whole = all(type(n) is int and 0 <= n < _MOST_STEPS for n in numbers)
        if whole and len(set(numbers)) == count:
            return numbers
    return range(first, first + count)


def device_of(document: Mapping[str, Any]) -> str:
    """Returns the device on which a trace's steps ran; ``"cpu"`` if the trace does not say it."""
    other = document.get("otherData")
    device = other.get("device") if isinstance(other, dict) else None
    return device if isinstance(device, str) and device.isidentifier() else "cpu"


def caveat(device: str) -> str:
    """Returns a warning about the times of a trace from this device; empty for ``"cpu"``."""
    if device == "cpu":
        return ""
    return (
        f"On a {device} each action waited until its work was done: these steps took longer than "
        "others, and no transfer hid behind an action."
    )


class _TrackWriter:
    """Writes the records of one track of a trace.

    Attributes:
        placement: Which rank owns which stage.
        pids: For each rank the number of its process in the trace.
        scale: Microseconds in one unit of the events' times.
        threads: The thread of each transfer; other events are on ``_COMPUTE_THREAD``.
    """

    def __init__(self, placement: Placement, pids: Sequence[int], scale: float) -> None:
        self.placement, self.pids, self.scale = placement, pids, scale
        self.threads: dict[Event, int] = {}

    def names(self, label: str, events: Sequence[Event]) -> list[_Json]:
        """Gives each transfer a thread; returns the records that name processes and threads.

        Args:
            label: What follows "rank 0" in the names of processes.
            events: The events of the track.
        """
        records: list[_Json] = []
        for rank, pid in enumerate(self.pids):
            threads = {_COMPUTE_THREAD: "compute"}
            free: list[float] = []
            transfers = [e for e in events if e.rank == rank and isinstance(e.op, (Send, Recv))]
            for event in sorted(transfers, key=lambda event: event.start):
                lane = next((i for i, end in enumerate(free) if end <= event.start), len(free))
                free[lane : lane + 1] = [event.end]
                self.threads[event] = _COMPUTE_THREAD + 1 + lane
                threads[_COMPUTE_THREAD + 1 + lane] = f"transfers {lane + 1}"
            records.append(
                _metadata_record("process_name", pid, 0, {"name": f"rank {rank}{label}"})
            )
            records.append(_metadata_record("process_sort_index", pid, 0, {"sort_index": pid}))
            for thread, name in threads.items():
                records.append(_metadata_record("thread_name", pid, thread, {"name": name}))
        return records

    def slices(self, events: Iterable[Event]) -> list[_Json]:
        """Returns a record of phase "X" for each event, and one for the exchange at its end."""
        return [
            {
                "ph": "X",
                "name": each.name,
                "cat": _category(event) if each is event else each.name,
                "dur": self._time(each.end) - self._time(each.start),
                **self._position(each),
                "args": self._arguments(each),
            }
            for event in events
            for each in (event, *_exchange_event(event))
        ]

    def arrows(self, prefix: str, events: Iterable[Event], edges: Iterable[Edge]) -> list[_Json]:
        """Returns an arrow, as a pair of records, for each value that went between ranks.

        Args:
            prefix: What the numbers of the arrows begin with, so that no other track has them.
            events: The events of the track.
            edges: The edges of the model.
        """
        records: list[_Json] = []
        for name, source, target in _transfers_between_ranks(events, edges, self.placement):
            common = {"name": name, "cat": "transfer", "id": f"{prefix}{name} {len(records) // 2}"}
            records.append({"ph": "s", **common, **self._position(source)})
            records.append({"ph": "f", "bp": "e", **common, **self._position(target)})
        return records

    def _position(self, event: Event) -> _Json:
        """Returns the process, the thread and the begin of an event, as keys of a record."""
        thread = self.threads.get(event, _COMPUTE_THREAD)
        return {"pid": self.pids[event.rank], "tid": thread, "ts": self._time(event.start)}

    def _time(self, time: float) -> float:
        """Converts a time to microseconds, rounded to the nanosecond."""
        return round(time * self.scale, 3)

    def _arguments(self, event: Event) -> _Json:
        """Returns what a viewer shows when a user clicks on an event."""
        op = event.op
        queued: _Json = {"queued": self._time(event.queued)} if event.queued else {}
        if isinstance(op, Action):
            chunk = self.placement.stages_of(event.rank).index(op.stage)
            action = {"stage": op.stage, "chunk": chunk, "micro-batch": op.micro_batch}
            return {**action, **({"early": event.early} if event.early else {}), **queued}
        if isinstance(op, (Send, Recv)):
            return {"edge": str(op.edge), "micro-batch": op.micro_batch, **queued}
        return queued


def _exchange_event(event: Event) -> Iterator[Event]:
    """Yields an event for the exchange that an event waits for at its end, if any."""
    if event.exchange:
        yield event._replace(name="exchange", start=event.end - event.exchange, exchange=0.0)


def _category(event: Event) -> str:
    """Returns the category of an event's record, which a viewer colours it by."""
    op = event.op
    if isinstance(op, Action):
        return _CATEGORIES[op.kind]
    if isinstance(op, Fused):
        return "fused"
    return type(op).__name__.lower() if op is not None else "other"


def _transfers_between_ranks(
    events: Iterable[Event], edges: Iterable[Edge], placement: Placement
) -> list[tuple[str, Event, Event]]:
    """Returns each value sent between ranks: its name, and the events that sent and received it.

    Without measured transfers the events are the actions that made and took the value. If several
    steps have events of one name, the n-th that sent belongs to the n-th that received.
    """
    events_by_operation: defaultdict[object, list[Event]] = defaultdict(list)
    micro_batches: dict[int, None] = {}
    for event in events:
        op = event.op
        if isinstance(op, (Send, Recv)):
            events_by_operation[str(op)].append(event)
        for action in event.actions:
            kind = "B" if action.kind == "I" else action.kind
            events_by_operation[kind, action.stage, action.micro_batch].append(event)
            micro_batches[action.micro_batch] = None
    records: list[tuple[str, Event, Event]] = []
    crossing = [e for e in edges if placement.rank_of(e.source) != placement.rank_of(e.target)]
    for edge in crossing:
        for k in micro_batches:
            for kind, source, target in (("F", *edge[:2]), ("B", *edge[1::-1])):
                name = f"{kind}{edge}.{k}"
                ends = events_by_operation.get("S" + name), events_by_operation.get("R" + name)
                if None in ends:
                    ends = (
                        events_by_operation.get((kind, source, k)),
                        events_by_operation.get((kind, target, k)),
                    )
                records += [(name, *pair) for pair in zip(ends[0] or (), ends[1] or ())]
    return records


def _metadata_record(name: str, pid: int, thread: int, arguments: _Json) -> _Json:
    """Returns a record that names or orders a process or thread."""
    return {"ph": "M", "name": name, "pid": pid, "tid": thread, "args": arguments}
