from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.schedules import Costs, Edge, Placement, build
from fleetpipe.schedules.forms.chrome import chrome_trace, write_trace
from fleetpipe.schedules.forms.events import Event, events_of

NAMES = ["1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"]


def of_phase(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_a_slice_of_its_rank(name: str, tmp_path: Path) -> None:
    timeline = build(name, ranks=3, micro_batches=6).simulate(Costs(comm=0.5))
    placement = timeline.schedule.placement
    file = tmp_path / "trace.json"
    write_trace(file, {"predicted": events_of(timeline)}, placement)
    document = json.loads(file.read_text())
    assert document["otherData"] == {"predicted": "1 unit of time = 1000 microseconds"}
    slices = of_phase(document, "X")
    assert len(slices) == sum(map(len, timeline.schedule.actions))
    for rank, row in enumerate(timeline.events):
        mine = [event for event in slices if event["pid"] == rank + 1]
        assert [event["name"] for event in mine] == [str(item) for item, _, _ in row]
        assert [event["ts"] for event in mine] == [1000 * start for _, start, _ in row]
        assert [event["dur"] for event in mine] == [1000 * (end - start) for _, start, end in row]
    labels = {
        event["pid"]: event["args"]["name"]
        for event in of_phase(document, "M")
        if event["name"] == "process_name"
    }
    assert labels == {1: "rank 0", 2: "rank 1", 3: "rank 2"}


def test_an_exchange_is_a_slice_within_its_action() -> None:
    events = [Event(0, "F0.0", 1, 4, 2), Event(0, "W0.0", 4, 5)]
    slices = of_phase(chrome_trace({"": events}, Placement("loop", 1)), "X")
    shown = [(one["name"], one["cat"], one["ts"], one["dur"]) for one in slices]
    assert shown[1] == ("exchange", "exchange", 2000, 2000)
    assert [one[0] for one in shown] == ["F0.0", "exchange", "W0.0"]
    assert slices[1]["tid"] == slices[0]["tid"]


@pytest.mark.parametrize("name", NAMES)
def test_an_arrow_joins_the_two_ends_of_every_transfer(name: str) -> None:
    schedule = build(name, ranks=3, micro_batches=6)
    document = chrome_trace({"predicted": events_of(schedule.simulate())}, schedule.placement)
    slices = {(e["pid"], e["tid"], e["ts"]) for e in of_phase(document, "X")}
    starts = {event["id"]: event for event in of_phase(document, "s")}
    ends = {event["id"]: event for event in of_phase(document, "f")}
    placement = schedule.placement
    ranks = [placement.rank_of(stage) for stage in range(placement.stages)]
    crossing = sum(first != second for first, second in itertools.pairwise(ranks))
    assert len(starts) == len(ends) == 2 * 6 * crossing
    assert starts.keys() == ends.keys()
    for key, begin in starts.items():
        end = ends[key]
        assert {(e["pid"], e["tid"], e["ts"]) for e in (begin, end)} <= slices
        assert begin["pid"] != end["pid"]
        assert begin["ts"] < end["ts"]
        assert end["bp"] == "e"


def test_measured_transfers_are_drawn_and_joined() -> None:
    events = [
        Event(0, "F0.0", 0, 1e-3),
        Event(0, "SF0>1.0", 1e-3, 3e-3),
        Event(0, "SF0>1:mask.0", 2e-3, 4e-3),
        Event(1, "RF0>1.0", 0, 3e-3),
        Event(1, "RF0>1:mask.0", 3e-3, 4e-3),
        Event(1, "F1.0", 4e-3, 5e-3),
        Event(1, "STEP", 6e-3, 7e-3),
        Event(1, "loss", 7e-3, 7e-3),
    ]
    document = chrome_trace(
        {"measured": events},
        Placement("loop", 2),
        edges=[Edge(0, 1), Edge(0, 1, "mask")],
        microseconds={"measured": 1e6},
    )
    slices = {event["name"]: event for event in of_phase(document, "X")}
    assert (slices["F1.0"]["ts"], slices["F1.0"]["dur"]) == (4000, 1000)
    assert [slices[n]["tid"] for n in ("F0.0", "SF0>1.0", "SF0>1:mask.0")] == [1, 2, 3]
    assert [slices[n]["tid"] for n in ("RF0>1.0", "RF0>1:mask.0")] == [2, 2]
    assert [slices[n]["cat"] for n in ("STEP", "loss", "RF0>1.0")] == ["step", "other", "recv"]
    assert [(e["name"], e["tid"]) for e in of_phase(document, "s")] == [
        ("F0>1.0", 2),
        ("F0>1:mask.0", 3),
    ]


def test_predicted_and_measured_ranks_stand_side_by_side() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    events = events_of(schedule.simulate())
    twice = [event._replace(start=event.start + 20, end=event.end + 20) for event in events]
    document = chrome_trace(
        {"predicted": events, "measured": [*events, *twice]}, schedule.placement
    )
    labels = [
        (event["pid"], event["args"]["name"])
        for event in of_phase(document, "M")
        if event["name"] == "process_name"
    ]
    assert sorted(labels) == [
        (1, "rank 0 predicted"),
        (2, "rank 0 measured"),
        (3, "rank 1 predicted"),
        (4, "rank 1 measured"),
    ]
    # Two steps in one track: each arrow stays within its step.
    spans: defaultdict[str, list[float]] = defaultdict(list)
    for event in of_phase(document, "s") + of_phase(document, "f"):
        spans[event["id"]].append(event["ts"])
    assert len(spans) == 4 + 8
    assert all(abs(first - second) < 10_000 for first, second in spans.values())
