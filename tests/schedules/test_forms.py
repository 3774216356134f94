"""Forms of a schedule: its text, its drawing in a terminal, and its trace for a browser."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules import Costs, Edge, Placement, Plan, Schedule, build, render
from fleetpipe.schedules.forms.terminal import summary
from fleetpipe.schedules.forms.trace import Event, chrome_trace, events_of, write_trace
from tests.schedules.sample_schedules import schedule_of

pytestmark = pytest.mark.no_paddle


HEADER = "# fleetpipe-schedule 1 name=A ranks=2 micro_batches=1 chunks=1 placement=loop"
PLAN = HEADER.replace("schedule", "plan") + " edges=0>1"


def test_the_text_form_is_exactly_this() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    assert str(schedule) == (
        "# fleetpipe-schedule 1 name=1F1B ranks=2 micro_batches=2 chunks=1 placement=loop\n"
        "F0.0 F0.1 B0.0 B0.1\n"
        "F1.0 B1.0 F1.1 B1.1"
    )


def test_options_are_one_word() -> None:
    given = ((" ", "a b"), ("groups", (2, (1, 3))), ("on", True), ("share", 0.5))
    schedule = Schedule("A", Placement("loop", 1), 1, ((),), options=given)
    header = str(schedule).split("\n")[0]
    assert header.endswith(
        'options={"\\u0020":"a\\u0020b","groups":[2,[1,3]],"on":true,"share":0.5}'
    )
    assert Schedule.parse(str(schedule)) == schedule


def test_an_idle_rank_is_a_hyphen() -> None:
    schedule = Schedule.parse(f"{HEADER}\nF0.0 B0.0\n-\n")
    assert schedule.actions[1] == ()
    assert str(schedule).endswith("\n-")


@pytest.mark.parametrize(
    ("text", "line", "token", "expected"),
    [
        (f"{HEADER}\nF0.0 F0.3junk\nF1.0", "line 2", "F0.3junk", "F0.3 or"),
        (f"{HEADER}\nF0.0 B0.0\nF1", "line 3", "F1", "F0.3 or"),
        (f"{HEADER}\nF0.0 -\nF1.0", "line 2", "-", "F0.3 or"),
        (f"{HEADER}\nF0.0 F0.{'9' * 5000}\nF1.0", "line 2", "F0.99", "F0.3 or"),
        (HEADER.replace("ranks=2", f"ranks={'9' * 5000}"), "line 1", "ranks=99", "whole number"),
        (f"{HEADER}\nF0.0", "line 2", "1 lines", "2 lines after the header"),
        (f"{HEADER}\n-\n-\n-", "line 3", "3 lines", "2 lines after the header"),
        (f"{HEADER}\n\nF1.0", "line 2", "empty", "'-' where idle"),
        (HEADER.replace(" ranks=2", ""), "line 1", "ranks", "ranks=.."),
        (HEADER.replace(" placement=loop", ""), "line 1", "placement", "placement=.."),
        (HEADER + " ranks=2", "line 1", "ranks", "one ranks="),
        (HEADER + " depth=2", "line 1", "depth=2", "one of name="),
        (HEADER.replace("ranks=2", "ranks=two"), "line 1", "ranks=two", "whole number"),
        (HEADER.replace("ranks=2", "ranks=02"), "line 1", "ranks=02", "whole number"),
        (HEADER.replace("batches=1", "batches=0"), "line 1", "micro_batches=0", "at least 1"),
        (HEADER.replace("=loop", "=wee"), "line 1", "wee", "did you mean 'vee'"),
        (HEADER.replace("=loop", "=vee"), "line 1", "chunks=1", "chunks=2"),
        (HEADER.replace("schedule 1", "schedule 2"), "line 1", "no header", "fleetpipe-schedule 1"),
        (HEADER + " options=4", "line 1", "4", "object of JSON"),
        (HEADER + " options={'a':1}", "line 1", "{'a':1}", "object of JSON"),
        (HEADER + ' options={"a":{}}', "line 1", '{"a":{}}', "object of JSON"),
        (PLAN, "line 1", "no header", "fleetpipe-schedule 1"),
        ("", "line 1", "no header", "fleetpipe-schedule 1"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, line: str, token: str, expected: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(text)
    for part in (line, token, expected):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{PLAN}\nF0.0 SF0>1\n-", "cannot read 'SF0>1'"),
        (f"{PLAN}\nF0.0 SF0>1.0x\n-", "cannot read 'SF0>1.0x'"),
        (f"{PLAN}\nF0.0 TF0>1.0\n-", "cannot read 'TF0>1.0'"),
        (f"{PLAN}\nFREE0\n-", "cannot read 'FREE0'"),
        (PLAN.replace(" edges=0>1", ""), "'edges' is missing"),
        (PLAN.replace("0>1", "1>0"), "1>0 does not lead"),
        (PLAN.replace("0>1", "0>1;"), "cannot read the edge '0>1;'"),
        (PLAN.replace("0>1", "-0>1"), "cannot read the edge '-0>1'"),
        (PLAN.replace("0>1", "0>1:b,0>1:a") + "\n-\n-", "not sorted"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Plan.parse(text + "\n-\n-" if "\n" not in text else text)


@pytest.mark.parametrize(
    ("m", "width", "first", "second", "unit"),
    [
        (2, 80, "F0 F1 .  .  B0--- .  B1---", ".  F0 B0--- F1 B1--- .  .", "3 characters"),
        (2, 28, "F0F1....B0--..B1--", "..F0B0--F1B1--....", "2 characters"),
        (4, 28, "FF..BBFBBFBB.BB", ".FBBFBBFBBFBB..", "1 character"),
    ],
)
def test_actions_are_as_long_as_they_take(
    m: int, width: int, first: str, second: str, unit: str
) -> None:
    assert render(build("1F1B", ranks=2, micro_batches=m).simulate(), width=width) == (
        f"rank 0  {first}\nrank 1  {second}\ntime 1 = {unit}, . = idle"
    )


def test_the_second_stage_of_a_rank_has_small_letters_where_numbers_do_not_fit() -> None:
    timeline = build("ZBV", ranks=2, micro_batches=2).simulate()
    full, short, shortest = (render(timeline, width=width) for width in (120, 50, 28))
    assert full.startswith("rank 0  F0.0 F0.1 .    F3.0 I3.0 W3.0 F3.1")
    assert short.startswith("rank 0  F0F1..f0i0w0f1i1w1")
    assert shortest.startswith("rank 0  FF.fiwfiw")
    assert "small letters" not in full
    for drawn in (short, shortest):
        assert drawn.endswith("small letters = the second stage of a rank")
    three = build("Interleaved1F1B", ranks=2, micro_batches=2, chunks=3).simulate()
    assert "small letters" not in render(three, width=50)


def test_exchanges_stand_at_the_end_of_their_actions() -> None:
    timeline = build("1F1B", ranks=2, micro_batches=1).simulate(Costs(2, backward=4, exchange=1))
    assert render(timeline, width=80) == (
        "rank 0  F0 .  .  .  B0-~~\nrank 1  .  F0 B0-~~ .  .\n"
        "time 1 = 1.5 characters, . = idle, ~ = waits for an exchange"
    )
    longer = build("1F1B", ranks=2, micro_batches=4).simulate(timeline.costs)
    assert render(longer, width=32).startswith("rank 0  F~..BB~BB~BB.BB\n")


def test_every_action_is_written_whole_where_times_fall_between_characters() -> None:
    costs = Costs(forward=18.522, input_grad=18.086, weight_grad=9.337, comm=0.601)
    timeline = build("ZBH1", ranks=4, micro_batches=12).simulate(costs)
    for width in (500, 290):
        for rank, line in enumerate(render(timeline, width=width).split("\n")[:-1]):
            tokens = re.findall(r"[FIW]\d+", line)
            row = timeline.schedule.actions[rank]
            assert tokens == [_short(str(action)) for action in row]


def _short(token: str) -> str:
    return token[0] + token.partition(".")[2]


def test_long_timelines_are_squeezed_into_the_width() -> None:
    drawn = render(build("1F1B", ranks=4, micro_batches=500).simulate(), width=100).split("\n")
    assert max(map(len, drawn)) == 100
    assert drawn[-1] == f"time {3 * 503 / 92:g} = 1 character, . = idle"


def test_chunks_are_told_apart_by_stage_and_fused_units_are_marked() -> None:
    vee = schedule_of(Placement("vee", 1, 2), 1, "F0.0 F1.0 B1.0 B0.0")
    assert "F0.0 F1.0 B1.0----- B0.0-----" in render(vee.simulate(), width=80)
    fused = schedule_of(Placement("loop", 1), 2, "F0.0 (F0.1|B0.0) B0.1")
    assert "F0 (F1|B0)- B1---" in render(fused.simulate(), width=80)
    many = schedule_of(
        Placement("loop", 1), 5, "F0.0 (F0.1|B0.0) F0.2 F0.3 F0.4 B0.1 B0.2 B0.3 B0.4"
    )
    assert "F***FFFBBBBBBBB" in render(many.simulate(), width=30)


def test_no_time_at_all_can_be_drawn() -> None:
    costs = Costs(forward=0, input_grad=0, weight_grad=0)
    assert render(build("1F1B", ranks=1, micro_batches=1).simulate(costs)).startswith("rank 0")


def test_the_summary_gives_the_figures() -> None:
    text = summary(build("1F1B", ranks=4, micro_batches=8).simulate(Costs(bytes=10)))
    assert "bubble            9 (27.27% of the span)" in text
    assert "peak activations  4 3 2 1" in text
    assert "peak bytes        40 30 20 10" in text


def test_costs_in_nanoseconds_are_drawn_alike() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    large = schedule.simulate(Costs(forward=1e9, input_grad=1e9, weight_grad=1e9))
    assert render(large).split("\n")[:2] == render(schedule.simulate()).split("\n")[:2]


def of_phase(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"])
def test_entries_are_slices_of_their_rank_that_arrows_join(name: str, tmp_path: Path) -> None:
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
    # An arrow joins the two ends of every transfer.
    corners = {(event["pid"], event["tid"], event["ts"]) for event in slices}
    starts, ends = ({e["id"]: e for e in of_phase(document, phase)} for phase in "sf")
    ranks = [placement.rank_of(stage) for stage in range(placement.stages)]
    crossing = sum(first != second for first, second in itertools.pairwise(ranks))
    assert len(starts) == 2 * 6 * crossing
    assert starts.keys() == ends.keys()
    for key, begin in starts.items():
        end = ends[key]
        assert {(e["pid"], e["tid"], e["ts"]) for e in (begin, end)} <= corners
        assert begin["pid"] != end["pid"]
        assert begin["ts"] < end["ts"]
        assert end["bp"] == "e"


def test_an_exchange_is_a_slice_within_its_action() -> None:
    events = [Event(0, "F0.0", 1, 4, 2), Event(0, "W0.0", 4, 5)]
    slices = of_phase(chrome_trace({"": events}, Placement("loop", 1)), "X")
    shown = [(one["name"], one["cat"], one["ts"], one["dur"]) for one in slices]
    assert shown[1] == ("exchange", "exchange", 2000, 2000)
    assert [one[0] for one in shown] == ["F0.0", "exchange", "W0.0"]
    assert slices[1]["tid"] == slices[0]["tid"]


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
