from __future__ import annotations

import pytest

from fleetpipe.schedules import Action, Costs, Recv, build
from fleetpipe.schedules.forms.events import Event, events_of, figures_of


@pytest.mark.parametrize("name", ["1F1B", "ZBH1", "DualPipeV"])
def test_the_figures_of_events_are_those_of_the_timeline(name: str) -> None:
    timeline = build(name, ranks=3, micro_batches=6).simulate(Costs(comm=0.25, overlapped=1.5))
    figures = figures_of(events_of(timeline))
    assert figures.span == timeline.span
    assert figures.busy == timeline.busy
    assert figures.bubble_rate == timeline.bubble_rate


def test_only_actions_count() -> None:
    events = [
        Event(0, "SF0>1.0", 0, 1),
        Event(0, "F0.0", 1, 2),
        Event(0, "B0.0", 5, 7),
        Event(0, "STEP", 7, 20),
        Event(0, "data", 0, 1),
    ]
    assert tuple(figures_of(events)) == (6, 3)
    assert figures_of(events).bubble == 3
    assert figures_of([]).bubble_rate == 0


def test_what_a_name_says() -> None:
    assert Event(0, "F0.3", 0, 1).actions == (Action("F", 0, 3),)
    fused = Event(0, "(F0.1|B1.0)", 0, 1).actions
    assert fused == (Action("F", 0, 1), Action("B", 1, 0))
    assert isinstance(Event(0, "RF0>1.3", 0, 1).op, Recv)
    assert Event(0, "data", 0, 1).op is None
    assert Event(0, "SF0>1.3", 0, 1).actions == ()
