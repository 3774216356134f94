"""What is read of the folder of a run that died, goes on, lacks files or has damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.view.history import attempts_of
from fleetpipe.contrib.view.run_folder import read
from fleetpipe.contrib.view.showing.page import page
from fleetpipe.errors import ConfigError
from fleetpipe.job.run_files import append_line, read_lines
from fleetpipe.schedules import Placement
from tests.contrib.view.job_records import row, schedule, written
from tests.fixtures import Capture

pytestmark = pytest.mark.no_paddle


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run in this folder"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        read(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="this is a file, and no folder of a run"):
        read(tmp_path / "run.json")


def test_rows_are_those_of_the_file(tmp_path: Path) -> None:
    rows = [row(1, 2.5), row(2, 1.25, acc=0.5), row(2, 3.0, "eval", acc=0.25)]
    run = read(written(tmp_path / "run", rows, schedule=schedule()))
    assert [(each.step, each.figures) for each in run.train] == [
        (1, {"loss": 2.5}),
        (2, {"loss": 1.25, "acc": 0.5}),
    ]
    assert [each.figures for each in run.evaluations] == [{"loss": 3.0, "acc": 0.25}]
    assert run.pipeline is not None
    assert run.pipeline.peaks == (2, 1)
    assert len(run.pipeline.predicted) == 16


def test_a_torn_last_line_is_left_out_and_told_of(tmp_path: Path) -> None:
    folder = written(tmp_path, [row(1, 2.0), row(2, 1.0)])
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 3, "pha')
    run = read(folder)
    assert [each.step for each in run.train] == [1, 2]
    assert any("one line of metrics.jsonl cannot be read" in note for note in run.notes)


def test_of_a_step_that_ran_twice_the_later_row_counts(tmp_path: Path) -> None:
    rows = [row(step, 1.0) for step in (1, 2, 3)] + [row(2, 0.5)]
    assert [each.figures["loss"] for each in read(written(tmp_path, rows)).train] == [1, 0.5, 1]


def test_a_line_is_added_behind_a_torn_one(tmp_path: Path) -> None:
    file = tmp_path / "lives.jsonl"
    file.write_text('{"event": "be')
    append_line(file, {"event": "end"})
    append_line(file, {"event": "begin"})
    assert read_lines(file) == ([{"event": "end"}, {"event": "begin"}], 1)


def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    notes = " ".join(read(tmp_path).notes)
    assert "metrics.jsonl is missing" in notes
    assert "TraceSteps([10, 11]" in notes
    (tmp_path / "run.json").unlink()
    notes = " ".join(read(written(tmp_path, [row(1, 2.0)])).notes)
    assert "run.json is missing" in notes
    assert "There was no evaluation" not in notes
    assert "add ThroughputMonitor() to the callbacks" in notes


def test_an_evaluation_is_missed_when_the_first_epoch_is_over(tmp_path: Path) -> None:
    """The first one comes behind it: nobody knows before whether there will be one."""

    def notes(rows: list[dict[str, Any]], *lives: dict[str, object]) -> str:
        folder = written(tmp_path, rows)
        (folder / "lives.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lives))
        return " ".join(read(folder).notes)

    first = [row(step, 2.0) for step in range(1, 11)]
    said = "There was no evaluation"
    assert said not in notes(first, line("begin", 1, "a"))
    assert said not in notes(first, line("begin", 1, "a"), line("end", 1, "a", code=1))
    assert said in notes(first, line("begin", 1, "a"), line("end", 1, "a", code=0))
    assert said in notes([*first, row(11, 2.0)], line("begin", 1, "a"))
    assert said not in notes([*first, row(10, 2.0, "eval"), row(11, 2.0)], line("begin", 1, "a"))


def line(event: str, number: int, process: str, **more: object) -> dict[str, object]:
    return {"event": event, "life": number, "time": 1e9, "step": 0, "process": process, **more}


def test_attempts_are_told_apart_by_their_processes() -> None:
    found = attempts_of(
        [
            line("begin", 1, "a"),
            line("end", 1, "", code=137, step=52, culprit="rank 1 died"),
            line("begin", 2, "b", step=50),
            line("end", 2, "b", code=0, step=70),
            line("begin", 2, "b", step=70),
            line("end", 2, "b", code=0, step=90),
            line("begin", 3, "c", step=90),
            line("end", 3, "", code=0, saved=95),
            line("begin", 4, "d", step=95),
            line("end", 4, "", code=130, step=96, culprit="interrupted"),
            line("begin", 5, "e", step=95),
            line("end", 5, "", code=130, saved=97, culprit="interrupted"),
            line("begin", 6, "f", step=97),
        ]
    )
    assert [(each.step, each.last_step, each.failed) for each in found] == [
        *((0, 52, True), (50, 90, False), (90, 95, False)),
        *((95, 96, False), (95, 97, False), (97, None, False)),
    ]
    assert [each.outcome for each in found] == [
        *("rank 1 died", "finished", "asked to stop, and saved 95 steps"),
        *("interrupted", "interrupted, and saved 97 steps", ""),
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json"])
def test_a_page_does_not_replace_the_run(tmp_path: Path, name: str, capsys: Capture) -> None:
    folder = written(tmp_path, [row(1, 1.0)], versions={})
    before = (folder / name).read_text()
    assert main(["report", str(folder), "-o", str(folder / name)]) == 2
    assert "is a file of the run" in capsys.readouterr().err
    assert (folder / name).read_text() == before


@pytest.mark.parametrize(
    ("name", "chunks", "placement"),
    [
        *(("1F1B", 1, "loop"), ("Interleaved1F1B", 2, "loop"), ("ZBV", 2, "vee")),
        *(("Hanayo", 4, "wave"), ("Interleaved1F1B", 4, "loop")),
    ],
)
def test_a_trace_says_where_the_stages_are(
    tmp_path: Path, name: str, chunks: int, placement: str, traced: Callable[..., None]
) -> None:
    folder = written(tmp_path, [row(1, 1.0)])
    traced(folder / "trace.json", name, chunks)
    run = read(folder)
    assert run.pipeline is not None
    assert run.pipeline.placement == Placement(placement, 2, chunks)
    assert "<svg" in page(run)


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        ({"dur": 10**400}, "is no time"),
        ({"ts": float("inf")}, "is no time"),
        ({"ts": float("nan")}, "is no time"),
        ({"name": "F5.0"}, "no placement has stages"),
        ({"name": "F4000000000.0"}, "no placement has stages"),
    ],
)
def test_a_trace_that_cannot_have_been_is_left_out(
    tmp_path: Path, spoil: dict[str, object], refusal: str, traced: Callable[..., None]
) -> None:
    folder = written(tmp_path, [row(1, 1.0)])
    traced(folder / "trace.json")
    document = json.loads((folder / "trace.json").read_text())
    next(each for each in document["traceEvents"] if each["name"] == "F0.3").update(spoil)
    (folder / "trace.json").write_text(json.dumps(document))
    run = read(folder)
    assert run.pipeline is None
    assert any(refusal in note for note in run.notes)
    assert page(run).endswith("</html>")


@pytest.mark.parametrize("step", [float("inf"), float("nan"), 10**400, "x"])
def test_an_attempt_that_ended_at_no_step_has_none(step: object) -> None:
    lines = [line("begin", 1, "a"), {**line("end", 1, "a", code=1), "step": step}]
    assert attempts_of(lines)[0].last_step is None


def test_a_folder_that_an_earlier_version_wrote() -> None:
    run = read(Path(__file__).parents[3] / "data" / "run")
    assert [(row.step, row.epoch) for row in run.train] == [(1, 0), (2, 1)]
    assert [row.figures["loss"] for row in run.evaluations] == [1166.9141845703125, 208089568.0]
    assert run.section("layout")["pp"] == 2
    assert run.pipeline is not None
    assert len(run.pipeline.measured) == len(run.pipeline.predicted) == 8
