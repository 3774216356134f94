"""The predicted and measured timelines of a pipeline, from a schedule's text and a trace."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fleetpipe.schedules import Placement, Schedule
from fleetpipe.schedules.forms.chrome import caveat, device_of, steps_of, tracks_of
from fleetpipe.schedules.forms.events import Event, events_of, median_step

#: Ranks that a pipeline may have of which a trace does not show stages: each is a row to draw.
_MOST_IDLE = 1000
_TRACKS = ("predicted", "measured")


@dataclass(frozen=True)
class Pipeline:
    """The timelines of a pipeline.

    Attributes:
        placement: Which rank owns which stage.
        predicted: The schedule, simulated with the median costs of the trace; without a trace with
            a cost of 1 for each of F, I and W.
        traced: The events of each traced step; empty without a trace.
        numbers: The numbers of these steps in the run.
        unit: The unit of the times: ``"s"``, or empty if they are costs of 1.
        peaks: The most forwards that each rank holds under the schedule; empty if unknown.
        caveat: A warning about the traced steps, or empty.
    """

    placement: Placement
    predicted: list[Event]
    traced: list[list[Event]]
    numbers: Sequence[int] = ()
    unit: str = ""
    peaks: tuple[float, ...] = ()
    caveat: str = ""

    @property
    def measured(self) -> list[Event]:
        """The events of the traced step with the median bubble; empty without a trace."""
        return self.traced[median_step(self.traced)] if self.traced else []


def pipeline_of(schedule: Any, trace: Path | None) -> Pipeline | None:
    """Returns the timelines of a run; None without a schedule and a trace.

    Args:
        schedule: The schedule in ``run.json``, with its text form under ``"text"``.
        trace: A ``trace.json`` with both tracks, as a run writes it.

    Raises:
        OSError, ValueError, KeyError, TypeError: The trace is not such a file.
        FleetPipeError: The text is not a schedule.
    """
    text = schedule.get("text") if isinstance(schedule, dict) else None
    simulated = Schedule.parse(text).simulate() if isinstance(text, str) else None
    peaks = simulated.peak_activations if simulated else ()
    if trace is None:
        if simulated is None:
            return None
        return Pipeline(simulated.schedule.placement, events_of(simulated), [], peaks=peaks)
    document = json.loads(trace.read_text(encoding="utf-8"))
    tracks, stages = _read(document, trace.name)
    steps = _steps(tracks["measured"])
    return Pipeline(
        placement_of(stages),
        _from_zero(tracks["predicted"]),
        [_from_zero(step) for step in steps],
        steps_of(document, len(steps)),
        unit="s",
        peaks=peaks,
        caveat=caveat(device_of(document)),
    )


def _read(document: Any, name: str) -> tuple[dict[str, list[Event]], dict[int, int]]:
    """Returns the actions of each track of a trace, in seconds, and the ranks of the stages."""
    events = tracks_of(document)
    if not events.keys() <= {*_TRACKS}:
        raise ValueError(f"{name} has the tracks {', '.join(events)}")
    tracks = {track: [one for one in events.get(track, ()) if one.actions] for track in _TRACKS}
    stages: dict[int, int] = {}
    for event in chain.from_iterable(tracks.values()):
        for action in event.actions:
            if stages.setdefault(action.stage, event.rank) != event.rank:
                raise ValueError(f"stage {action.stage} is on two ranks in {name}")
    return tracks, stages


def placement_of(stages: dict[int, int]) -> Placement:
    """Returns the placement that puts the stages on the ranks of the trace."""
    ranks = max(stages.values(), default=0) + 1
    if ranks > max(_MOST_IDLE, len(stages)):
        raise ValueError(f"no pipeline of {ranks} ranks has just {len(stages)} stages")
    chunks = -(-max(1, len(stages)) // ranks)
    names = ("loop", *(["vee"] if chunks == 2 else []), *(["wave"] if chunks % 2 == 0 else []))
    for placement in (Placement(name, ranks, chunks) for name in names):
        if all(
            stage < placement.stages and placement.rank_of(stage) == rank
            for stage, rank in stages.items()
        ):
            return placement
    raise ValueError(f"no placement has stages {stages} (stage: rank)")


def _steps(events: Sequence[Event]) -> list[list[Event]]:
    """Splits a trace into steps, in each of which every action runs once."""
    runs: defaultdict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        runs[event.rank, event.name].append(event)
    return [list(step) for step in zip(*runs.values())]


def _from_zero(events: Sequence[Event]) -> list[Event]:
    begin = min((event.start for event in events), default=0.0)
    return [event._replace(start=event.start - begin, end=event.end - begin) for event in events]
