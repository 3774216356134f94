from __future__ import annotations

import pytest

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules import Placement, Plan, Schedule, build
from tests.schedules.helpers import schedule_of

HEADER = "# fleetpipe-schedule 1 name=A ranks=2 micro_batches=1 chunks=1 placement=loop"
PLAN = HEADER.replace("schedule", "plan") + " edges=0>1"


def test_the_text_form_is_exactly_this() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    assert str(schedule) == (
        "# fleetpipe-schedule 1 name=1F1B ranks=2 micro_batches=2 chunks=1 placement=loop\n"
        "F0.0 F0.1 B0.0 B0.1\n"
        "F1.0 B1.0 F1.1 B1.1"
    )


def test_a_vee_with_split_backward_and_a_fused_pair_is_kept() -> None:
    schedule = schedule_of(
        Placement("vee", 1, 2), 2, "F0.0 F1.0 (F0.1|B1.0) I0.0 W0.0 F1.1 B1.1 B0.1"
    )
    assert Schedule.parse(str(schedule)) == schedule
    assert hash(Schedule.parse(str(schedule))) == hash(schedule)


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
        (PLAN.replace("0>1", "0>1:b,0>1:a") + "\n-\n-", "not sorted"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Plan.parse(text + "\n-\n-" if "\n" not in text else text)
