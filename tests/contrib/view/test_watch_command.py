"""``fleetpipe watch``: of a folder, of a job that trains, and what is read first of twelve runs."""

from __future__ import annotations

import html
import json
import logging
import math
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import paddle
import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.view import reporting
from fleetpipe.contrib.view.board import FILE, read_board
from fleetpipe.contrib.view.history import FILE as HISTORY
from fleetpipe.contrib.view.history import History, HistoryRow, read_history
from fleetpipe.contrib.view.serving import AttemptBoard
from fleetpipe.contrib.view.slow_ranks import SlowRank
from fleetpipe.job.allow import Allow
from fleetpipe.job.records import LastRecord, RankRecord, RunProgress
from tests.contrib.view.job_records import board, written_on
from tests.contrib.view.recorded import RUNS
from tests.fixtures import Capture, Patch
from tests.pipelines import adam, batch, model_in_job

pytestmark = pytest.mark.once


def write(folder: Path, **fields: object) -> None:
    (folder / FILE).write_text(json.dumps(board(**fields).content()))


def test_sixteen_ranks_in_a_pipe_of_eighty_columns(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    one = RankRecord(0, "F0.0", (0,), step=1500, step_age=0.09, busy=0.03, memory=334 * 10**6)
    whole = replace(one, memory_limit=25_276_502_016, held=16, held_cap=16, state="waiting")
    ranks = tuple(replace(whole, rank=n, stages=(n,), awaited=0) for n in range(16))
    write(tmp_path, ranks=ranks, slow=(), step=1500, steps=8000)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    text = capsys.readouterr().out
    assert text.count(" 3% ") == 16
    assert "rank 1 was ended by SIGKILL" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


def test_texts_of_a_job_are_no_commands_to_the_terminal(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    odd = RankRecord(0, "[red]F0.0[/x]\x1b[2J", state="\x1b[1m", busy=1e9)
    slow = (SlowRank(0, "[b]\x07", 2.0, ""),)
    write(tmp_path, ranks=(odd,), slow=slow, news="\x1b]0;x\x07", steps=sys.maxsize)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    text = capsys.readouterr().out
    assert "[red]F0.0[/x]\\x1b[2J" in text
    assert not {"\x1b", "\x07"} & {*text}


@pytest.mark.parametrize("until", [math.inf, sys.maxsize, 1 << 70])
def test_a_run_of_endless_steps_has_no_end(until: float) -> None:
    progress = RunProgress()
    progress.expect(3, until)  # type: ignore[arg-type]
    assert RankRecord.of(progress.record(0, "F0.0", with_rows=False).content()).steps is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing"], "there is no such folder"),
        (["."], "nobody keeps the board of a job in this folder"),
        (["localhost:1", "--once"], "no job is served at localhost:1"),
        ([".", "--json"], "give --once --json"),
    ],
)
def test_what_cannot_be_watched(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_board_of_the_launcher_outlives_an_attempt(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    shown = AttemptBoard()
    assert shown().ranks == ()
    first.mkdir()
    shown.begin(first)
    write(first, restarts=0, news="")
    of_loss = History([HistoryRow(11, {"loss": 0.25})])
    (first / HISTORY).write_text(json.dumps(of_loss.content()))
    assert (shown().step, shown().restarts, shown().news) == (11, 0, "")
    second.mkdir()
    shown.begin(second, 1, "attempt 2, since rank 1 was ended by SIGKILL")
    before = time.time()
    between = shown()
    assert [rank.state for rank in between.ranks] == ["starting", "starting"]
    assert (between.step, between.restarts) == (11, 1)
    assert (between.step_time, between.eta_seconds) == (0.0, None)
    assert between.history.rows() == read_history(second).rows() == of_loss.rows()
    (restart,) = read_history(second).events
    assert str(restart) == "step 11: attempt 2, since rank 1 was ended by SIGKILL"
    assert between.news == "attempt 2, since rank 1 was ended by SIGKILL"
    assert before <= between.at <= time.time()


def test_a_job_of_one_process(tmp_path: Path, monkeypatch: Patch) -> None:
    """Its board is served while it trains, and says at the end that it has ended."""
    monkeypatch.setenv("FLEETPIPE_LIFE", str(tmp_path))
    monkeypatch.setenv("FLEETPIPE_SERVE", "0")
    said: list[str] = []
    monkeypatch.setattr(
        "fleetpipe.contrib.view.reporting._log.info", lambda _, url: said.append(url)
    )
    with model_in_job(2, memory_cap=3) as model:
        optimizer = adam(model, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))
        losses = [float(model.train_batch(batch(), optimizer)) for _ in range(3)]
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{said[0]}status.json", timeout=5) as answer:
                status = json.load(answer)
            if status["step"] == 3:
                break
            time.sleep(0.1)
    assert status["step"] == 3
    (rank,) = status["ranks"]
    assert (rank["rank"], rank["stage"], rank["state"]) == (0, 0, "running")
    assert 0 < rank["busy"] <= 1
    assert rank["memory"] > 10_000_000
    assert status["samples_per_second"] == pytest.approx(8 / status["step_time"])
    last = read_board(tmp_path / FILE)
    assert last.gradient_norm == pytest.approx(optimizer.gradient_norm, rel=1e-5)
    assert (last.ranks[0].held, last.ranks[0].held_cap) == (2, 3)
    assert rank["memory"] < (last.ranks[0].memory_limit or 0)
    assert last.history.series()["loss"] == ([1, 2, 3], losses)
    assert last.history.series()["step time"][0] == [2, 3]
    assert (last.ranks[0].state, last.news) == ("ended", "the job has ended")
    assert replace(last, ranks=()).slow == ()


def test_a_second_attempt_keeps_figures_and_events_of_the_first(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    def recorded(first: int, last: int) -> History:
        job = SimpleNamespace(progress=RunProgress(), allow=Allow())
        job.progress.folders.append(tmp_path)
        writer = reporting.BoardWriter(job, 1e9 + first)  # type: ignore[arg-type]
        for step in range(first, last + 1):
            # The first board of an attempt comes before its first step.
            writer.add({0: LastRecord(RankRecord(0, "", step=step - 1))}, 1e9 + step)
            job.progress.expect(step, None)
            job.progress.note({"loss": 1.0 / step})
        writer.close(RankRecord(0, "", step=last, saved=last, saved_age=0.0), 1e9 + last + 1)
        return read_history(tmp_path)

    recorded(1, 10)
    monkeypatch.setenv("FLEETPIPE_INCARNATION", "2")
    second = recorded(6, 12)
    assert second.series()["loss"] == ([*range(1, 13)], [1.0 / step for step in range(1, 13)])
    assert [(event.kind, event.step) for event in second.events] == [("start", 0), ("save", 12)]
    assert second.events[-1].times == 2


def test_warnings_and_what_was_let_pass_are_events(tmp_path: Path) -> None:
    progress, allow = RunProgress(), Allow(("optimizer:MySAM",))
    progress.folders.append(tmp_path)
    records = {0: LastRecord(RankRecord(0, ""))}
    job = SimpleNamespace(progress=progress, heard=lambda: records, allow=allow)
    reporter = reporting.Reporter(job)  # type: ignore[arg-type]
    progress.expect(1, None)
    progress.note({"loss": 2.0})
    logging.getLogger("fleetpipe.checkpoint").warning("the disk is slow\nsecond line")
    logging.getLogger("fleetpipe.job.allow").warning("it has an event of its own")
    allow.refuse("optimizer", "MySAM", "it has a step of its own", fix="")
    reporter.close()
    assert [(event.kind, event.text) for event in read_history(tmp_path).events] == [
        ("start", "the training begins"),
        ("warning", "the disk is slow"),
        ("allowed", "optimizer:MySAM was let pass: it has a step of its own"),
    ]


def test_a_board_that_takes_long_is_there_before_the_last_one(tmp_path: Path) -> None:
    asked = threading.Event()

    def last_records() -> dict[int, LastRecord]:
        asked.set()
        time.sleep(0.5)
        return {0: LastRecord(RankRecord(0, ""))}

    progress = RunProgress()
    progress.folders.append(tmp_path)
    progress.expect(1, None)
    reporter = reporting.Reporter(
        SimpleNamespace(progress=progress, last_records=last_records, allow=Allow())
    )  # type: ignore[arg-type]
    progress.note({"loss": 2.0})
    assert asked.wait(10)
    reporter.close()
    assert not reporter._thread.is_alive()
    last = read_board(tmp_path / FILE)
    assert [rank.state for rank in last.ranks] == ["ended"]
    assert last.history.series()["loss"] == ([1], [2.0])


def test_a_folder_that_another_job_writes_into_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    said: list[str] = []
    warning = "fleetpipe.contrib.view.reporting._log.warning"
    monkeypatch.setattr(warning, lambda text, *values: said.append(text % values))
    reporting._warn_of_other_job(tmp_path)
    write(tmp_path, at=time.time() - 60)
    reporting._warn_of_other_job(tmp_path)
    assert said == []
    write(tmp_path)
    reporting._warn_of_other_job(tmp_path)
    assert said == [f"another job runs in {tmp_path}: give each a folder of its own"]


#: By run: how the answer that is read first begins, with its question.
FIRST = {
    "dead": "state: dead or cut off: nothing was heard for 1 h 0 min, since ",
    "hung": "state: hangs: no step for 20 s, where one takes 0.5 s",
    "slow loader": "time: 54.5% data: the loader is slow: give it more workers, or a faster disk;",
    "slow rank, always": "slow: rank 1 is slow: compute takes 2.4 times as long as on ranks ",
    "slow rank, now and then": "state: running",
    "slow rank, at the start": "state: running",
    "slow save": "time: 44.0% saves: save less often, or in the background;",
    "NaN": "learning: NaN or infinite from step 147 on; loss nan",
    "diverging": "learning: diverges: its mean was down at 0.68",
    "healed": "state: running",
    "finished": "state: finished ",
    "two jobs in one folder": "state: running; another job writes into this folder: give",
}
#: By run: what is said further down.
FURTHER = {
    "dead": "",
    "hung": "rank 1 is slow: step takes 40.0 times as long as a usual step",
    "slow loader": "compute 36.4%, waiting for peers 9.1%, data 54.5%",
    "slow rank, always": "since step 25; likely its rows are longer",
    "slow rank, now and then": "nobody now; steps 60 to 176: rank 1 was slow in compute, 2 times",
    "slow rank, at the start": "nobody now; steps 25 to 87: rank 1 was slow in compute",
    "slow save": "steps 10 to 200: saved, 20 times",
    "NaN": "step 147: loss is nan",
    "diverging": "at step 100; loss 8",
    "healed": "step 121: rank 1 was ended by SIGKILL, another process has its place",
    "finished": "step 200 of 200",
    "two jobs in one folder": "step 101: another job writes into this folder",
}


@contextmanager
def recorded(name: str, folder: Path) -> Iterator[None]:
    """A run as it was recorded; one that is not over is written on."""
    # A slow machine writes histories less often, and the last one may lack a step.
    with patch.object(reporting, "_HISTORY_TIMES", 0):
        RUNS[name](folder, time.time())
    over = name in ("dead", "finished")
    with nullcontext() if over else written_on(folder, read_board(folder / FILE)):
        yield


def answers_of_page(text: str) -> list[tuple[str, str]]:
    """Returns the questions and answers of a page, as they are read."""
    (shown,) = re.findall(r'<dl id="answers">(.*?)</dl>', text, re.DOTALL)
    pairs = re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", shown)
    return [(html.unescape(question), html.unescape(answer)) for question, answer in pairs]


def lines_of(text: str) -> list[tuple[str, str]]:
    """Returns the questions and answers of a terminal, whose long lines are folded."""
    answers: list[tuple[str, str]] = []
    # Without anything wrong there is no column of marks.
    for line in text.partition("\nrank ")[0].splitlines():
        row = re.match(r"(!?) {0,3}(\S+) +(\S.*)", line)
        if row and len(row[0]) - len(row[3]) <= 14 and not line.startswith(" " * 12):
            answers.append((row[2], f"{row[1]} {row[3].strip()}".strip()))
        else:
            before = answers[-1]
            answers[-1] = before[0], f"{before[1]} {line.strip()}"
    return answers


def check(name: str, answers: list[tuple[str, str]]) -> None:
    """Checks questions and answers, of which what is wrong has a mark, as a person reads them."""
    question, text = next((one for one in answers if one[1].startswith("! ")), answers[0])
    assert f"{question}: {text.removeprefix('! ')}".startswith(FIRST[name])
    assert any(FURTHER[name] in answer for _, answer in answers)
    order = ["state", "learning", "done", "speed", "time", "slow", "happened"]
    asked = [question for question, _ in answers if question in order]
    assert asked == sorted(asked, key=order.index)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_read_first(name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "page.html"
    folder = tmp_path / "run"
    with recorded(name, folder):
        assert main(["watch", str(folder), "--once"]) == 0
        shown = capsys.readouterr().out
        assert main(["watch", str(folder), "--once", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert main(["report", str(folder), "-o", str(page)]) == 0
    assert len(shown.splitlines()) <= 24
    assert max(map(len, shown.splitlines())) <= 80
    check(name, lines_of(shown))
    check(name, answers_of_page(page.read_text(encoding="utf-8")))
    marks = {"bad": "! "}
    check(name, [(a["question"], marks.get(a["kind"], "") + a["text"]) for a in said["answers"]])
    assert said["happened"][0]["text"] == "the training begins"


def test_the_answers_in_a_browser(browser: str, tmp_path: Path) -> None:
    """They stand on the first screen of a window of 1280 x 720, none beside it."""
    script = """<script>addEventListener("load", () => {
        const box = document.querySelector("#answers").getBoundingClientRect();
        const told = document.createElement("pre");
        told.id = "seen";
        told.textContent = JSON.stringify([box.left, box.right, box.bottom]);
        document.body.append(told); });</script></body>"""
    for number, name in enumerate(RUNS):
        folder = tmp_path / str(number)
        with recorded(name, folder):
            assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        (tmp_path / "page.html").write_text(text.replace("</body>", script), encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,720"]
        command = [browser, *flags, "--dump-dom", (tmp_path / "page.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        seen = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout)
        left, right, bottom = json.loads(html.unescape(seen[-1]))
        assert left >= 0
        assert right <= 1280
        assert bottom <= 720
