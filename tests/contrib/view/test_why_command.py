"""``fleetpipe why``: tables and traces as users have them, and what is wrong with others."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.view.slowdown import alternatives, slowdown_of
from fleetpipe.contrib.view.trace_replay import steps_of
from fleetpipe.contrib.view.traced_ops import COLUMNS, TracedOperation, read_columns, read_trace
from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Placement, build
from fleetpipe.schedules.forms.trace import Event, events_of, with_early, write_trace
from tests.contrib.view.job_records import Slow, trace
from tests.fixtures import Capture

pytestmark = pytest.mark.no_paddle

LONG = {"F": "forward-compute", "B": "backward-compute"}


def table(path: Path, operations: list[TracedOperation]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, "host"])
        for one in operations:
            kind = LONG.get(one.kind, one.kind)
            row = (one.step, one.replica, one.stage, 0, kind, one.micro_batch)
            writer.writerow([*row, one.start, one.duration, "a"])
    return path


def test_a_table_says_what_was_slow(tmp_path: Path, capsys: Capture) -> None:
    path = table(tmp_path / "a.csv", trace(Slow("rank", 1, 2, factor=1.5)))
    assert main(["why", "--columns", str(path)]) == 0
    assert capsys.readouterr().out.startswith("Slow: rank (stage 2 of replica 1), 1.5")
    assert main(["why", "--columns", "--json", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {"S", "M_S", "M_W", "steps", "ranks", "causes", "schedules"} <= set(said)
    assert max(said["ranks"], key=lambda rank: rank["score"]) == {
        "replica": 1,
        "stage": 2,
        "score": pytest.approx(1, abs=0.3),
    }
    assert said["schedules"][0]["name"].startswith("ZBH")


def test_what_operations_do_not_explain_is_said_first(tmp_path: Path, capsys: Capture) -> None:
    operations = trace(Slow())
    first = min(one.start for one in operations)
    slow = [one._replace(start=first + 2 * (one.start - first)) for one in operations]
    assert main(["why", "--columns", str(table(tmp_path / "a.csv", slow))]) == 0
    said = capsys.readouterr().out
    assert re.match(r"[45]\d% of the steps' time went outside of the operations", said)
    assert "Of the rest: No rank, stage, link or micro-batch stands out" in said


def test_the_page_shows_the_slow_rank(tmp_path: Path, capsys: Capture) -> None:
    path = table(tmp_path / "a.csv", trace(Slow("rank", 1, 2, factor=1.5)))
    assert main(["why", "--columns", str(path), "-o", str(tmp_path / "a.html")]) == 0
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert f"<h1>{capsys.readouterr().out.splitlines()[0]}</h1>" in text
    assert "of replica 1 as it ran" in text
    # Of the slow rank alone the computations take half as long again as the mean of their kinds.
    factors = re.findall(r'title="replica (\d), stage (\d), step \d+: ([\d.]+) times"', text)
    hot = {(replica, stage) for replica, stage, factor in factors if float(factor) > 1.3}
    assert hot == {("1", "2")}
    # Both timelines have each computation of the replica, and the ideal one is shorter.
    assert text.count("F0.0 on rank 0: ") == 2


def test_a_table_in_parquet_is_the_same(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import parquet

    operations = trace(Slow("stage", stage=1, factor=2), steps=1)
    rows = {name: [getattr(one, name, 0) for one in operations] for name in COLUMNS}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    assert read_columns(tmp_path / "a.parquet") == operations
    parquet.write_table(pyarrow.table({"kinds": ["F"]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match="got: kinds"):
        read_columns(tmp_path / "b.parquet")


def test_chunks_are_parts_along_the_model(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    lines = [",".join(COLUMNS)]
    places = [(stage, chunk) for chunk in (0, 1) for stage in (0, 1)]
    lines += [f"0,0,{stage},{chunk},F,0,{2 * chunk + stage},1" for stage, chunk in places]
    path.write_text("\n".join(lines), encoding="utf-8")
    operations = read_columns(path)
    assert sorted(one.part for one in operations) == [0, 1, 2, 3]
    assert slowdown_of(steps_of(operations)).step_times == ((4.0, 4.0, 4.0),)


@pytest.mark.parametrize(
    ("name", "chunks", "alternative"),
    [
        *(("FThenB", 1, 4), ("1F1B", 1, 4), ("ZBH1", 1, 4), ("kFkB", 1, 4), ("Seq1F1B", 1, 0)),
        *(("Interleaved1F1B", 3, 0), ("DualPipeV", 2, 0), ("Hanayo", 4, 0)),
    ],
)
def test_a_trace_of_ours_is_read_step_by_step(
    tmp_path: Path, name: str, chunks: int, alternative: int
) -> None:
    timeline = build(name, ranks=2, micro_batches=4, chunks=chunks).simulate()
    step = events_of(timeline)
    two = [Event(e.rank, e.name, e.start + at, e.end + at) for at in (0.0, 100.0) for e in step]
    path = tmp_path / "trace.json"
    write_trace(path, {"measured": two, "predicted": step}, timeline.schedule.placement)
    steps = steps_of(read_trace(path), one_thread=True)
    # A unit is drawn as a millisecond.
    found = slowdown_of(steps)
    times = [row[1] for row in found.step_times]
    assert times == pytest.approx([timeline.makespan / 1000] * 2)
    assert (found.slowdown, found.causes) == (pytest.approx(1), ())
    assert len(alternatives(steps)) == alternative


def test_actions_that_were_taken_early_are_counted(tmp_path: Path, capsys: Capture) -> None:
    schedule = build("1F1B", ranks=2, micro_batches=4)
    step = events_of(schedule.simulate())
    taken = {"F0.2": "B0.0", "B0.0": "F0.2", "F0.3": "B0.1", "B0.1": "F0.3"}  # one for the other
    early = with_early([e._replace(name=taken.get(e.name, e.name)) for e in step], schedule.actions)
    assert {e.name: e.early for e in early if e.early} == {"F0.2": 1, "F0.3": 1}
    path = tmp_path / "trace.json"
    write_trace(path, {"measured": early, "predicted": step}, schedule.placement)
    assert {(o.kind, o.micro_batch) for o in read_trace(path) if o.early} == {("F", 2), ("F", 3)}
    assert main(["why", str(path)]) == 0
    assert "taken early by rank 0     2 actions" in capsys.readouterr().out


def test_high_numbers_of_micro_batches_and_stages_are_no_numbers_of_them(tmp_path: Path) -> None:
    events = [Event(0, name, at, at + 1.0) for at, name in enumerate(("F0.0", "F0.4000000000"))]
    path = tmp_path / "trace.json"
    write_trace(path, {"measured": events, "predicted": events}, Placement("loop", 1))
    assert alternatives(steps_of(read_trace(path)))
    rows = [f"0,0,{stage},0,F,0,0,1" for stage in (0, 4_000_000_000)]
    path.write_text("\n".join([",".join(COLUMNS), *rows]), encoding="utf-8")
    assert alternatives(steps_of(read_columns(path))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the table has no column 'step'"),
        ("step,stage,kind,start\n", "the table has no column 'duration'"),
        (",".join(COLUMNS), "the table has no rows"),
        (",".join(COLUMNS) + "\n0,0,0,0,F,0,now,1", "column 'start' has no number"),
        (",".join(COLUMNS) + "\n0,0,0,-1,F,0,0,1", "column 'chunk' has no whole number"),
        (",".join(COLUMNS) + "\n0,0,1e300,0,F,0,0,1", "column 'stage' has no whole number"),
        (",".join(COLUMNS) + "\n0,0,0,0,F,0,0,0", "no operation of the trace took any time"),
        (",".join(COLUMNS) + "\n0,0,0,0,F" + "F" * 200_000, "this is no table"),
        (",".join(COLUMNS) + "\n0.5,0,0,0,F,0,0,1", "column 'step' has no whole number"),
        (",".join(COLUMNS) + "\n0,0,0,0,,0,0,1", "an operation has no kind"),
        (",".join(COLUMNS) + "\n0,0,0,0,F,0,0,-1", "column 'duration' has no number"),
        (",".join(COLUMNS) + "\n0,0,0,0,F,0,0,nan", "column 'duration' has no number"),
    ],
)
def test_a_table_that_is_none_is_refused(
    tmp_path: Path, text: str, message: str, capsys: Capture
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    assert main(["why", "--columns", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "early", "message"),
    [
        (1_000_000, 0, "no pipeline of 1000001 ranks has just 2 stages"),
        (-1, 0, "0 early actions on rank -1"),
        (0, float("inf"), "inf early actions on rank 0"),
    ],
)
def test_numbers_of_a_trace_that_no_pipeline_has_are_refused(
    rank: int, early: float, message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "trace.json"
    ranks = [(0, 0, 0), (1, rank, early)]
    document = [
        event
        for pid, number, count in ranks
        for event in (
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {number} x"}},
            {"ph": "X", "name": f"F{number}.0", "pid": pid, "ts": 0, "dur": 5, "args": {}}
            | ({"args": {"early": count}} if count else {}),
        )
    ]
    path.write_text(json.dumps({"traceEvents": document}))
    assert main(["why", str(path), "-o", str(tmp_path / "why.html")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [1]}', '{"traceEvents": []}'])
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str, capsys: Capture) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    assert main(["why", str(path)]) == 2
    said = capsys.readouterr().err
    assert "no trace of fleetpipe's" in said or "the trace has no actions" in said
    assert main(["why", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
