"""The page of ``fleetpipe why``: one sentence, two timelines, and every rank in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.report.drawing import Drawing, laid_out
from fleetpipe.report.page import templates_of
from fleetpipe.report.timelines import placement_of
from fleetpipe.schedules.forms.events import Event
from fleetpipe.schedules.forms.panel import Panel
from fleetpipe.version import __version__
from fleetpipe.why.operations import COMMUNICATIONS, TracedOperation
from fleetpipe.why.replay import ReplayedStep
from fleetpipe.why.slowdown import Slowdown, ideal_times

#: Columns of the heat map; more steps share one.
_MOST_COLUMNS = 60
#: A rank whose computations take so many times the mean has the full colour.
_HOTTEST = 2.0


class HeatRow(NamedTuple):
    """A rank of the heat map, with what its computations take in each column, over the mean."""

    name: str
    factors: list[float]


def page(steps: Sequence[ReplayedStep], slowdown: Slowdown, sentence: str) -> str:
    """Returns the page as the text of an HTML file that loads nothing."""
    lost = [replayed - ideal for _, replayed, ideal in slowdown.step_times]
    slowest = int(np.argmax(lost))
    columns = _columns(len(steps))
    text: str = (
        templates_of(__package__)
        .get_template("why.html")
        .render(
            sentence=sentence,
            tiles=[
                ("slowdown S", f"{slowdown.slowdown:.3f}"),
                ("of the last stage, M_S", f"{slowdown.last_stage:.1%}"),
                ("of the slowest 3 %, M_W", f"{slowdown.slowest_ranks:.1%}"),
                ("of all communication", f"{slowdown.links:.1%}"),
            ],
            drawing=_timelines(steps, slowdown, slowest),
            heat=_heat(steps, slowdown, columns),
            columns=[str(steps[part[0]].operations[0].step) for part in columns],
            hottest=_HOTTEST,
            version=__version__,
        )
    )
    return text


def _timelines(steps: Sequence[ReplayedStep], slowdown: Slowdown, number: int) -> Drawing:
    """Returns a step as it ran and as it were with ideal times, of the replica that loses most."""
    step, ideal = steps[number], ideal_times(steps)
    replica = max(slowdown.ranks, key=lambda rank: slowdown.ranks[rank])[0]
    durations = np.array([ideal[one.kind] for one in step.operations])
    ends = step.ends(durations[:, None])[:, 0]
    begin = min(one.start for one in step.operations)
    chosen = [
        (one, end, duration)
        for one, end, duration in zip(step.operations, ends.tolist(), durations.tolist())
        if one.replica == replica and one.kind not in COMMUNICATIONS
    ]
    measured = [_event(one, one.start - begin, one.end - begin) for one, _, _ in chosen]
    replayed = [_event(one, end - duration, end) for one, end, duration in chosen]
    placement = placement_of({one.part: one.stage for one, _, _ in chosen})
    of = f" of replica {replica}" if len({rank[0] for rank in slowdown.ranks}) > 1 else ""
    name = f"Step {step.operations[0].step}{of}"
    return laid_out(
        [
            Panel(f"{name} as it ran", measured, placement, "s"),
            Panel("The same with every operation at its ideal time", replayed, placement, "s"),
        ]
    )


def _event(one: TracedOperation, start: float, end: float) -> Event:
    name = f"{one.kind}{one.part}.{one.micro_batch}" if len(one.kind) == 1 else one.kind
    return Event(one.stage, name, start, end)


def _columns(steps: int) -> list[range]:
    """Returns the steps that each column stands for."""
    width = -(-steps // _MOST_COLUMNS)
    return [range(first, min(first + width, steps)) for first in range(0, steps, width)]


def _heat(
    steps: Sequence[ReplayedStep], slowdown: Slowdown, columns: Sequence[range]
) -> list[HeatRow]:
    ideal = ideal_times(steps)
    rows = {rank: ([0.0] * len(columns), [0.0] * len(columns)) for rank in sorted(slowdown.ranks)}
    for column, part in enumerate(columns):
        for one in (each for number in part for each in steps[number].operations):
            if one.kind not in COMMUNICATIONS and one.rank in rows:
                taken, expected = rows[one.rank]
                taken[column] += one.duration
                expected[column] += ideal[one.kind]
    several = len({replica for replica, _ in rows}) > 1
    return [
        HeatRow(
            f"replica {replica}, stage {stage}" if several else f"stage {stage}",
            [seconds / (mean or 1.0) for seconds, mean in zip(taken, expected)],
        )
        for (replica, stage), (taken, expected) in rows.items()
    ]
