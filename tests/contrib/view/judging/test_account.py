"""Where the time of steps went: rows that add up to what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.view.judging.account import LIMITED, QUEUEING, STOLEN, Machine, account_of
from fleetpipe.contrib.view.judging.trace_replay import steps_of
from fleetpipe.contrib.view.reading.traced_ops import read_trace
from fleetpipe.job.records import BETWEEN, PARTS
from fleetpipe.schedules import Placement
from fleetpipe.schedules.forms.chrome import write_trace
from fleetpipe.schedules.forms.events import Event

pytestmark = pytest.mark.no_paddle

#: Two ranks for 10 s: the first one computes, the other waits for 6 s.
STEP = [
    Event(0, "F0.0", 0.0, 4.0, queued=1.0),
    Event(0, "SF0>1.0", 4.0, 5.0),
    Event(1, "RF0>1.0", 0.0, 6.0, queued=0.5),
    Event(1, "F1.0", 6.0, 10.0, queued=2.0),
]


def written(folder: Path, **machine: object) -> Path:
    tracks = {"measured": STEP, "predicted": STEP}
    scale = dict.fromkeys(tracks, 1e6)
    placement = Placement("loop", 2)
    write_trace(folder / "trace.json", tracks, placement, microseconds=scale, machine=machine)
    return folder / "trace.json"


def test_the_rows_add_up_to_the_step(tmp_path: Path) -> None:
    steps = steps_of(read_trace(written(tmp_path)), one_thread=True)
    account = account_of(steps, Machine(limited=(0.5,), stolen=(0.25,)))
    assert account == {
        "computing": (3.0 + 2.0) / 2 - 0.25,
        "waiting for messages": (1.0 + 5.5) / 2,
        QUEUEING: (1.0 + 2.5) / 2 - 0.5,
        LIMITED: 0.5,
        STOLEN: 0.25,
        "outside of operations": 5.0 / 2,
    }
    assert sum(account.values()) == 10.0


def test_the_time_from_one_step_to_the_next_is_outside_of_operations(tmp_path: Path) -> None:
    later = [one._replace(start=one.start + 25.0, end=one.end + 25.0) for one in STEP]
    tracks = {"measured": [*STEP, *later], "predicted": STEP}
    scale = dict.fromkeys(tracks, 1e6)
    write_trace(tmp_path / "trace.json", tracks, Placement("loop", 2), microseconds=scale)
    account = account_of(steps_of(read_trace(tmp_path / "trace.json"), one_thread=True), Machine())
    # A step takes 10 s; before the second one the ranks did something else for 15.
    assert sum(account.values()) == pytest.approx((10.0 + 25.0) / 2)
    assert account["outside of operations"] == pytest.approx(5.0 / 2 + 15.0 / 2)


def test_the_shares_of_wall_time_are_those_that_a_job_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the second step the ranks loaded data for 12 s of 15, and did something else for 3."""
    later = [one._replace(start=one.start + 25.0, end=one.end + 25.0) for one in STEP]
    tracks = {"measured": [*STEP, *later], "predicted": STEP}
    between = {
        "data": [7.0, 12.0],
        **{part: [0.0, 0.0] for part in BETWEEN[1:-1]},
        "other": [0.0, 3.0],
    }
    write_trace(
        tmp_path / "trace.json",
        tracks,
        Placement("loop", 2),
        microseconds=dict.fromkeys(tracks, 1e6),
        machine={"between": between},
    )
    assert main(["why", str(tmp_path), "--json", "-o", str(tmp_path / "why.html")]) == 0
    shares = json.loads(capsys.readouterr().out)["shares"]
    expected = {"compute": 6.75, "waiting": 3.25, "data": 12.0, "other": 3.0}
    assert shares == pytest.approx({part: expected.get(part, 0.0) / 25 for part in PARTS})
    assert main(["why", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("60% of the time passed between one step and the next, most of it in l")
    words = "compute 27.0%, waiting for peers 13.0%, data 48.0%, callbacks 0.0%, evaluation 0.0%"
    assert words in said
    assert words in (tmp_path / "why.html").read_text()


@pytest.mark.parametrize(
    ("ranks", "processors", "sentence"),
    [
        ([2], [2], ""),
        ([2], [1], "Nothing overlaps, since 2 ranks share one core."),
        ([1, 4], [1, 2], "At most 2 of 4 ranks compute at a time: they share cores."),
    ],
)
def test_what_the_machine_did_is_said(
    ranks: list[int],
    processors: list[int],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(tmp_path, ranks=ranks, processors=processors, load=3.5)
    assert main(["why", str(path), "-o", str(tmp_path / "why.html")]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("18% of the steps' time the ranks had no processor")
    assert first.endswith(sentence or ".")
    assert f"  {QUEUEING:<24}1.75 s, 17.5%" in lines
    assert any(line.startswith("load of the machine       3.5, ") for line in lines)
    assert (
        "<dt>waiting for messages</dt><dd>3.2 s, 32.5%</dd>" in (tmp_path / "why.html").read_text()
    )
    assert main(["why", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["account"]["outside of operations"] == 2.5


def test_a_record_of_the_machine_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(written(tmp_path, ranks=[-1]))]) == 2
    assert "where: otherData.machine.ranks[0]" in capsys.readouterr().err
