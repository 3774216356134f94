"""What a person reads first of each of twelve runs: in the terminal, on the page, and in JSON."""

from __future__ import annotations

import html
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.view.reading.board import FILE, read_board
from tests.contrib.view.boards import written_on
from tests.contrib.view.recorded import RUNS

pytestmark = pytest.mark.once

#: By run: which answer is read first, how it begins, and what is to be said further down.
FIRST: dict[str, tuple[str, str, str]] = {
    "dead": ("state", "dead or cut off: nothing was heard for 1 h 0 min, since ", ""),
    "hung": (
        *("state", "hangs: no step for 20 s, where one takes 0.5 s"),
        "rank 1 is slow: step takes 40.0 times as long as a usual step",
    ),
    "slow loader": (
        *("time", "54.5% data: the loader is slow: give it more workers, or a faster disk;"),
        "compute 36.4%, waiting for peers 9.1%, data 54.5%",
    ),
    "slow rank, always": (
        *("slow", "rank 1 is slow: compute takes 2.4 times as long as on ranks with the same"),
        "since step 25; likely its rows are longer",
    ),
    "slow rank, now and then": (
        *("state", "running"),
        "nobody now; steps 60 to 176: rank 1 was slow in compute, 2 times",
    ),
    "slow rank, at the start": (
        *("state", "running"),
        "nobody now; steps 25 to 87: rank 1 was slow in compute",
    ),
    "slow save": (
        *("time", "44.0% saves: save less often, or in the background;"),
        "steps 10 to 200: saved, 20 times",
    ),
    "NaN": (
        *("learning", "NaN or infinite from step 147 on; loss nan"),
        "step 147: loss is nan",
    ),
    "diverging": ("learning", "diverges: its mean was down at 0.68", "at step 100; loss 8"),
    "healed": (
        *("state", "running"),
        "step 121: rank 1 was ended by SIGKILL, another process has its place",
    ),
    "finished": ("state", "finished ", "step 200 of 200"),
    "two jobs in one folder": (
        *("state", "running; another job writes into this folder: give each a folder of its own"),
        "step 101: another job writes into this folder",
    ),
}


@contextmanager
def recorded(name: str, folder: Path) -> Iterator[None]:
    """A run as it was recorded; one that is not over is written on."""
    RUNS[name](folder, time.time())
    over = name in ("dead", "finished")
    with nullcontext() if over else written_on(folder, read_board(folder / FILE)):
        yield


class _Answers(HTMLParser):
    """The questions and answers of a page, as they are read."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[tuple[str, str]] = []
        self._kind = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside |= tag == "dl" and ("id", "answers") in attrs
        self._kind = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "dl"
        self._kind = ""

    def handle_data(self, data: str) -> None:
        if self._inside and self._kind == "dt":
            self.texts.append((data, ""))
        elif self._inside and self._kind == "dd":
            self.texts[-1] = (self.texts[-1][0], data)


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
    question, text, further = FIRST[name]
    first = next((one for one in answers if one[1].startswith("! ")), answers[0])
    assert first[0] == question
    assert first[1].removeprefix("! ").startswith(text)
    assert any(further in answer for _, answer in answers)
    order = ["state", "learning", "done", "speed", "time", "slow", "happened"]
    asked = [question for question, _ in answers if question in order]
    assert asked == sorted(asked, key=order.index)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_read_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    check(name, _Answers(page.read_text(encoding="utf-8")).texts)
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
