"""What is said of a job: whether it is alive, learns, how fast it is, and where its time went."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.view.answers import Answer, answers_of, describe_state
from fleetpipe.contrib.view.board import JobBoard, RunRecord
from fleetpipe.contrib.view.history import AttemptRecord, History, HistoryRow, RunEvent
from fleetpipe.contrib.view.trace_replay import (
    LIMITED,
    QUEUEING,
    STOLEN,
    Machine,
    account_of,
    steps_of,
)
from fleetpipe.contrib.view.traced_ops import read_trace
from fleetpipe.job.records import BETWEEN, PARTS, RankRecord
from fleetpipe.schedules import Placement
from fleetpipe.schedules.forms.trace import Event, write_trace
from tests.contrib.view.job_records import running
from tests.fixtures import Capture

pytestmark = pytest.mark.no_paddle

#: Two ranks for 10 s: the first one computes, the other waits for 6 s.
STEP = [
    Event(0, "F0.0", 0.0, 4.0, queued=1.0),
    Event(0, "SF0>1.0", 4.0, 5.0),
    Event(1, "RF0>1.0", 0.0, 6.0, queued=0.5),
    Event(1, "F1.0", 6.0, 10.0, queued=2.0),
]


def written(folder: Path, measured: Sequence[Event] = STEP, **machine: object) -> Path:
    tracks = {"measured": measured, "predicted": STEP}
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


def test_the_shares_of_wall_time_are_those_that_a_job_shows(
    tmp_path: Path, capsys: Capture
) -> None:
    """Before the second step the ranks loaded data for 12 s of 15, and did something else for 3."""
    later = [one._replace(start=one.start + 25.0, end=one.end + 25.0) for one in STEP]
    between = {part: [0.0, 0.0] for part in BETWEEN} | {"data": [7.0, 12.0], "other": [0.0, 3.0]}
    written(tmp_path, [*STEP, *later], between=between)
    assert main(["why", str(tmp_path), "--json", "-o", str(tmp_path / "why.html")]) == 0
    figures = json.loads(capsys.readouterr().out)
    expected = {"compute": 6.75, "waiting": 3.25, "data": 12.0, "other": 3.0}
    shares = {part: expected.get(part, 0.0) / 25 for part in PARTS}
    assert figures["shares"] == pytest.approx(shares)
    # A step takes 10 s; before the second one the ranks did something else for 15.
    assert sum(figures["account"].values()) == pytest.approx((10.0 + 25.0) / 2)
    assert figures["account"]["outside of operations"] == pytest.approx(5.0 / 2 + 15.0 / 2)
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
    capsys: Capture,
) -> None:
    path = written(tmp_path, ranks=ranks, processors=processors, load=3.5)
    assert main(["why", str(path), "-o", str(tmp_path / "why.html")]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("18% of the steps' time the ranks had no processor")
    assert first.endswith(sentence or ".")
    assert f"  {QUEUEING:<24}1.75 s, 17.5%" in lines
    assert any(line.startswith("load of the machine       3.5, ") for line in lines)
    assert (
        "<dt>waiting for messages</dt><dd>3.25 s, 32.5%</dd>" in (tmp_path / "why.html").read_text()
    )
    assert main(["why", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["account"]["outside of operations"] == 2.5


def test_a_record_of_the_machine_that_is_none_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert main(["why", str(written(tmp_path, ranks=[-1]))]) == 2
    assert "where: otherData.machine.ranks[0]" in capsys.readouterr().err


#: Midnight, where the tests run.
NOW = time.mktime((2026, 1, 2, 0, 0, 0, 0, 0, -1))


def answers(board: JobBoard) -> dict[str, Answer]:
    return {answer.question: answer for answer in answers_of(RunRecord("job", board), NOW)}


def of_losses(losses: Iterable[float], **figures: float) -> History:
    rows = [HistoryRow(step, {"loss": loss}) for step, loss in enumerate(losses, 1)]
    rows[-1] = rows[-1]._replace(figures={**rows[-1].figures, **figures})
    return History(rows)


def with_states(*states: str, **fields: object) -> JobBoard:
    ranks = (RankRecord(n, "F0.0", state=state, step_age=20.0) for n, state in enumerate(states))
    return running(ranks=tuple(ranks), **fields)


@pytest.mark.parametrize(
    ("board", "text", "kind"),
    [
        (running(), "running", "good"),
        (with_states("running", "stopped"), "stopped: rank 1", "bad"),
        (with_states("running", usual_step=0.5, step=100), "running", "good"),
        (with_states("ended", "ended", step=100), "ended", "open"),
        (with_states("ended", "ended", step=99), "ended before its last step", "bad"),
        (JobBoard(0.0), "starting", "open"),
    ],
)
def test_whether_it_is_alive(board: JobBoard, text: str, kind: str) -> None:
    assert describe_state(board, NOW) == Answer("state", text, kind)


def test_a_job_that_runs_names_what_is_wrong_with_it() -> None:
    assert running().slow
    assert answers(running())["state"] == Answer("state", "running, but see slow", "open")
    assert answers(running(slow=()))["state"] == Answer("state", "running", "good")


FALLING = [2.0 - 0.01 * step for step in range(100)]


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        (FALLING, ""),
        ([*FALLING[:6], *[math.nan] * 4], "NaN or infinite from step 7 on"),
        ([1.0, math.inf, 1.0], "NaN or infinite at step 2"),
        ([-1.0] * 10, ""),
    ],
)
def test_whether_it_learns(losses: list[float], text: str) -> None:
    said = answers(running(history=of_losses(losses)))["learning"]
    assert said.kind == ("bad" if text else "")
    assert said.text.startswith(f"{text}; loss" if text else "loss")


def test_what_is_known_of_learning() -> None:
    made = running(history=of_losses(FALLING, eval_loss=1.5), gradient_norm=math.nan)
    expected = (
        "loss 1.01, lately 1.03 in the mean; "
        "1.5 in the evaluation after step 100; gradient norm nan"
    )
    assert answers(made)["learning"].text == expected


def test_a_step_is_measured_against_the_best_of_the_run() -> None:
    times = [0.5] * 20 + [0.2] * 20 + [0.5] * 20
    rows = [HistoryRow(step, {"step time": each}) for step, each in enumerate(times, 1)]
    rows[-1] = HistoryRow(60, {"step time": 0.5, "tokens_per_second": 4096.0})
    made = running(step_time=0.5, history=History(rows))
    rates = "0.5 s/step, 64 samples/s, 4096 tokens/s"
    slower = f"{rates}; 2.5 times the 0.2 s of its best stretch, at step 25"
    assert answers(made)["speed"].text == slower
    assert answers(replace(made, step_time=0.21))["speed"].text == rates.replace("0.5", "0.21")


def test_a_run_that_has_ended_has_nothing_left() -> None:
    made = with_states("ended", "ended", step=100, news="the job has ended")
    assert answers(made)["done"].text == "step 100 of 100"
    assert "ended" not in answers(made)["happened"].text


def test_what_happened_stands_below_with_times_the_newest_last() -> None:
    saved, slow = (
        RunEvent(NOW - 60, 40, "save", "saved", 10, 4),
        RunEvent(NOW - 90_000, 8, "slow", "rank 1 was slow in data", 3),
    )
    failed = AttemptRecord(NOW - 100, 0, NOW - 30, 42, "rank 1 died", failed=True)
    going = AttemptRecord(NOW - 20, 40)
    made = running(history=History(events=[slow, saved]), attempts=(failed, going), slow=())
    said = answers_of(RunRecord("job", made), NOW)
    first = [answer.question for answer in said].index("happened")
    assert said[first].text.startswith("2 restarts, last checkpoint: step 10, 3.5 s ago")
    assert said[first + 1 :] == [
        Answer(time.strftime("%m-%d %H:%M", time.localtime(NOW - 90_000)), str(slow)),
        Answer("23:59:00", "steps 10 to 40: saved, 4 times"),
        Answer("23:59:30", "step 42: rank 1 died", "bad"),
    ]
    assert answers(made)["slow"] == Answer(
        *("slow", "nobody now; steps 3 to 8: rank 1 was slow in data", "open")
    )


@pytest.mark.parametrize(
    ("spent", "text"),
    [
        ((6.0, 4.0), "compute 60.0%, waiting for peers 40.0%"),
        ((4.0, 6.0), "60.0% waiting: the stages are uneven, the micro-batches few, or a rank is"),
    ],
)
def test_what_is_likely_where_much_time_goes(spent: tuple[float, ...], text: str) -> None:
    ranks = tuple(replace(rank, spent=spent) for rank in running().ranks)
    said = answers(running(ranks=ranks))["time"]
    assert said.text.startswith(text)
    assert said.kind == ("bad" if ":" in text else "")


def test_the_step_of_a_nan_is_exact_in_a_long_run() -> None:
    """A row of the history stands for many steps there."""
    rows = [HistoryRow(step, {"loss": math.nan if step > 7000 else 1.0}) for step in range(1, 9000)]
    events = [RunEvent(NOW, 7001, "nan", "loss is nan", 7001)]
    long = running(history=History(rows, events=events))
    assert answers(long)["learning"].text.startswith("NaN or infinite from step 7,001 on")
