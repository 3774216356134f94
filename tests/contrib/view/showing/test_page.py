"""The page of a run, and that of several: well formed, escaped, loads nothing, right figures."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.checkpoint.files.manifest import Entry, FileSummary, Manifest, WrittenPart
from fleetpipe.cli import main
from fleetpipe.contrib.pictures import Panel
from fleetpipe.contrib.view.board import Series
from fleetpipe.contrib.view.run_folder import read
from fleetpipe.contrib.view.showing.drawing import (
    Chart,
    Curve,
    axis_marks,
    format_bytes,
    format_column,
    format_duration,
    format_figure,
    lay_out_timelines,
    mean_window,
    thin_out,
)
from fleetpipe.contrib.view.showing.page import comparison, page, short_names
from fleetpipe.mesh.parts import Described
from fleetpipe.schedules import Placement
from fleetpipe.schedules.forms.trace import Event
from tests.contrib.view.job_records import EVIL, row, schedule, written
from tests.fixtures import Capture
from tests.ground.test_without_paddle import without_paddle

pytestmark = pytest.mark.no_paddle

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Parsed(HTMLParser):
    """The elements of a page: tags that are open, sections, scripts, text, and what it names."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.sections: dict[str, str] = {}
        self.charts: list[dict[str, Any]] = []
        self.scripts = 0
        self.names: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self._data = False
        self._section = "head"
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.attributes.append(values)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self._section = values["id"] or ""
        if tag == "script":
            self._data = values.get("type") == "application/json"
            self.scripts += not self._data
        self.names += [value or "" for name, value in attrs if name in ("src", "href", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if self._data:
                self.charts.append(json.loads(data))
        elif self.open[-1:] != ["style"]:
            self.sections[self._section] = self.sections.get(self._section, "") + data + "\n"


@pytest.fixture
def folder(tmp_path: Path, traced: Callable[[Path], None]) -> Path:
    rows = [
        row(step, 2 / step, acc=step / 40, learning_rate=0.1, samples_per_second=100.5)
        for step in range(1, 31)
    ]
    rows[-1].update(held_by_rank=[2, 1], peak_memory_by_process=[3.5e8, 1.75e8])
    rows += [row(step, 3 / step, "eval", acc=0.5) for step in (10, 20, 30)]
    stages = [
        {"stage": stage, "rank": stage, "layers": ["Linear", "Linear", "relu"], "parameters": 750}
        for stage in (0, 1)
    ]
    config = {"model": {"width": 8, "data": {"rows": 9}}}
    about = {"stages": stages, "versions": {"fleetpipe": "0.1"}, "config": config}
    written(tmp_path / "run", rows, schedule=schedule(), **about)
    (tmp_path / "run" / "trace").mkdir()
    traced(tmp_path / "run" / "trace" / "trace.json")
    return tmp_path / "run"


def test_the_figures_of_the_page_are_those_of_the_file(folder: Path) -> None:
    parsed = Parsed(page(read(folder), now=1.7e9 + 90))
    assert parsed.open == []
    assert list(parsed.sections) == [
        *("head", "curves", "throughput", "pipeline", "stages"),
        *("evaluations", "configuration"),
    ]
    loss, acc, rate, throughput, memory = ([*chart["curves"]] for chart in parsed.charts)
    assert loss[0] == {
        "name": "training",
        "colour": 0,
        "kind": "line",
        "xs": list(range(1, 31)),
        "ys": [2 / step for step in range(1, 31)],
        "times": list(range(30)),
        "window": 1,
    }
    assert loss[1]["ys"] == [3 / step for step in (10, 20, 30)]
    assert [curve["name"] for curve in acc] == ["training", "evaluation"]
    assert set(rate[0]["ys"]) == {0.1}
    assert set(throughput[0]["ys"]) == {100.5}
    assert [(each["name"], each["xs"], each["ys"]) for each in memory] == [
        ("process 0", [30], [pytest.approx(0.35)]),
        ("process 1", [30], [pytest.approx(0.175)]),
    ]
    assert "the last row is 1 min 0 s old" in parsed.sections["head"]
    caption = ["all", "3", "Figures", "of", "each", "evaluation,", "the", "newest", "last"]
    assert parsed.sections["evaluations"].split() == [
        *("Evaluations", *caption, "epoch", "step", "loss", "acc"),
        *("1", "10", "0.3000", "0.5000", "2", "20", "0.1500", "0.5000"),
        *("3", "30", "0.1000", "0.5000"),
    ]
    pipeline = parsed.sections["pipeline"]
    # 1F1B on two ranks: (m + 1) * 3 long, of which 3 m are busy.
    assert "Predicted with the median cost of each action: bubble 20.0%" in pipeline
    assert "Measured, step 2: bubble 20.0%" in pipeline
    # Predicted beside each of the two steps, and measured in the first.
    assert pipeline.count("B0.3 on rank 0: 20 ms") == 3
    assert pipeline.count("B0.3 on rank 0: 40 ms") == 1
    assert re.search(r"2 Linear, relu\s+750\s+50\.0%\s+2\s+2\s+1\s", parsed.sections["stages"])
    expected = "Configuration config model.width 8 model.data.rows 9 versions fleetpipe 0.1"
    assert " ".join(parsed.sections["configuration"].split()).startswith(expected)


def test_the_hash_is_that_of_the_newest_checkpoint(folder: Path) -> None:
    for step in (9, 30):
        weight = Entry("model", Described("float32", (0,)), (WrittenPart(None, 0),), f"{step:064x}")
        home = folder / "checkpoints" / f"step-{step:08d}"
        home.mkdir(parents=True)
        tensors = {TensorName(MODEL, "0.weight"): weight}
        files = {"model": FileSummary(0, 0)}
        contents = Manifest(step, files, tensors, ("0.weight",), None, {}, {}, {})
        (home / "manifest.json").write_text(contents.to_text())
    answer = f"hash\n{contents.model_hash[:12]}, of step 30\n"
    assert answer in Parsed(page(read(folder))).sections["head"]
    (home / "manifest.json").write_text("torn")
    assert ", of step 30" not in page(read(folder))


def test_figures_of_many_ranks_are_summed_up(tmp_path: Path) -> None:
    shares = [place / 20 for place in range(11)]
    rows = [row(step, 1.0, busy_share_by_rank=shares, gradient_norm=0.5) for step in (1, 2, 3)]
    parsed = Parsed(page(read(written(tmp_path, rows))))
    busy = parsed.charts[-1]["curves"]
    assert [(each["name"], each["ys"][0]) for each in busy] == [
        ("least of 11", 0),
        ("median of 11", 25),
        ("most of 11", 50),
    ]
    assert "gradient norm" in parsed.sections["curves"]
    # Elapsed time counts from the first row.
    assert busy[0]["times"] == [0, 1, 2]


def test_the_folder_of_a_trace_alone_has_a_page(
    tmp_path: Path, traced: Callable[[Path], None]
) -> None:
    traced(tmp_path / "trace.json")
    parsed = Parsed(page(read(tmp_path)))
    assert list(parsed.sections) == ["head", "pipeline", "missing"]
    assert "Measured, step 2" in parsed.sections["pipeline"]
    for name in ("metrics.jsonl", "run.json"):
        assert f"{name} is missing" in parsed.sections["missing"]


def test_whatever_a_run_says_is_text(tmp_path: Path) -> None:
    rows = [row(1, 1.0, **{EVIL: 0.5}), row(1, 1.0, "eval", **{EVIL: 0.5})]
    about = {
        "config": {EVIL: EVIL, "nested": {EVIL: [EVIL]}},
        "versions": {EVIL: EVIL},
        "command": [EVIL],
        "schedule": {**schedule(), "name": EVIL},
        "stages": [{"stage": EVIL, "rank": 0, "layers": [EVIL], "parameters": 1.5}],
    }
    folder = written(tmp_path / "<b>run", rows, **about)
    lives = {"event": "begin", "life": 1, "time": 0, "step": 0, "process": EVIL}
    end = {"event": "end", "life": 1, "time": 1, "code": 1, "culprit": EVIL, "details": EVIL}
    (folder / "lives.jsonl").write_text(json.dumps(lives) + "\n" + json.dumps(end) + "\n")
    run = read(folder)
    before = copy.deepcopy(run.about)
    text = page(run)
    assert run.about == before
    parsed = Parsed(text)
    assert EVIL not in text
    assert (parsed.names, parsed.scripts) == ([], 1)
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?:", text)
    assert "<b>run" in parsed.sections["head"]
    # As a tile, the titles of a chart, a column, settings, and the end of a life.
    expected = ["head", "curves", "evaluations", "pipeline", "stages", "attempts", "configuration"]
    assert [section for section in expected if EVIL not in parsed.sections[section]] == []


def test_a_name_with_quotes_stays_within_its_attribute(tmp_path: Path) -> None:
    name = 'x" onload="alert(1)'
    text = page(read(written(tmp_path, [row(1, 1.0, **{name: 0.5})])))
    assert name not in text
    labels = [values["aria-label"] for values in Parsed(text).attributes if "aria-label" in values]
    assert f"{name} by step" in labels


def test_what_is_no_number_is_a_gap_and_is_said(tmp_path: Path) -> None:
    losses = [3.0, math.nan, math.inf, 2.0, 1.0]
    run = read(written(tmp_path, [row(step, loss) for step, loss in enumerate(losses, 1)]))
    text = page(run)
    assert Parsed(text).charts[0]["curves"][0]["ys"] == [3.0, None, None, 2.0, 1.0]
    assert "NaN or infinite at step 3; loss 1" in text


def test_a_curve_of_many_steps_keeps_its_peaks() -> None:
    ys = [1.0] * 100_000
    ys[77_777], ys[12_345] = 50.0, math.nan
    whole = Series(range(100_000), ys, range(100_000))
    xs, values, times = thin_out(whole)
    assert len(xs) < 1200
    assert (77_777, 50.0) in zip(xs, values)
    assert (xs[0], xs[-1]) == (0, 99_999)
    assert xs == times
    assert [x for x, y in zip(xs, values) if math.isnan(y)] == [12_345]
    assert all(ys[x] == y for x, y in zip(xs, values) if x != 12_345)
    assert [mean_window(count) for count in (100_000, 100, 10)] == [15, 5, 1]
    (data,) = Chart("loss", "", [Curve("training", whole)]).script_data["curves"]
    assert len(data["xs"]) == len(data["ys"]) == len(xs)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0.0101, ["0", "0.002", "0.004", "0.006", "0.008", "0.01"]),
        (2e-9, ["0", "5.000e-10", "1.000e-09", "1.500e-09", "2.000e-09"]),
        (45.0, ["0", "10", "20", "30", "40"]),
        (2_400_000, ["0", "500,000", "1,000,000", "1,500,000", "2,000,000"]),
    ],
)
def test_the_axis_of_time_has_round_numbers(end: float, expected: list[str]) -> None:
    assert [format_figure(mark) for mark in axis_marks(end)] == expected


def test_numbers_are_short_and_stand_below_each_other() -> None:
    assert [format_figure(x) for x in (0, 0.5, 12345.6, 1.5e-7, 2.5e12, math.nan)] == [
        *("0", "0.5", "12,346", "1.500e-07", "2.500e+12", "nan")
    ]
    assert format_column([12.5, 0.25]) == ["12.50", "0.25"]
    assert [format_bytes(x) for x in (12, 1.5e9)] == ["12 B", "1.5 GB"]
    assert [format_duration(x) for x in (0.25, 59.6, 3700, 3e5)] == [
        *("0.2 s", "1 min 0 s", "1 h 1 min", "3 days")
    ]


def test_boxes_keep_their_texts_beside_an_operation_that_is_no_action() -> None:
    names = ("F0.0", "optimizer", "F0.1")
    events = [Event(0, name, start, start + 1.0) for start, name in enumerate(names)]
    (track,) = lay_out_timelines([Panel("step", events, Placement("loop", 1, 1), "s")]).tracks
    assert [text for _, _, text in track.shapes] == [f"{name} on rank 0: 1.0 s" for name in names]


def test_many_boxes_of_one_colour_are_one_shape() -> None:
    events = [Event(0, f"F0.{n}", float(n), n + 1.0) for n in range(4)]
    events += [Event(0, f"B0.{n}", n + 4.0, n + 5.0) for n in range(4)]
    panel = Panel("step", events, Placement("loop", 1, 1), "s")
    (apart,), (joined,) = (lay_out_timelines([panel], most).tracks for most in (8, 7))
    assert len(apart.shapes) == 8
    assert joined.shapes == {
        (kind, "1", ""): [outlines[0] for key, outlines in apart.shapes.items() if key[0] == kind]
        for kind in "FB"
    }


def test_the_command_needs_no_paddle(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    done = without_paddle(
        f"""
from fleetpipe.cli import main
assert main(["report", {str(folder)!r}, "-o", {str(target)!r}]) == 0
assert not any(name.startswith("paddle") for name in sys.modules)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{target}: ")
    assert Parsed(target.read_text()).open == []


def run(folder: Path, factor: float, name: str, **figures: Any) -> Path:
    rows = [row(step, factor / step, **figures) for step in (1, 2, 4)]
    rows.append(row(4, 3 * factor, "eval", acc=factor / 4))
    config = {"model": {"width": 8}, "rate": factor, EVIL: EVIL}
    return written(folder, rows, schedule=schedule(name), config=config)


def test_curves_figures_and_settings_of_two_runs(tmp_path: Path) -> None:
    runs = {
        EVIL: read(run(tmp_path / "a", 1.0, "1F1B")),
        "b": read(run(tmp_path / "b", 2.0, "ZBH1", samples_per_second=50.0)),
    }
    text = comparison(runs, now=1.7e9)
    parsed = Parsed(text)
    assert parsed.open == []
    assert parsed.scripts == 1
    assert parsed.names == []
    assert list(parsed.sections) == ["head", "figures", "settings", "curves", "throughput"]
    loss = parsed.charts[0]["curves"]
    assert [(each["name"], each["colour"], each["ys"]) for each in loss] == [
        (EVIL, 0, [1, 0.5, 0.25]),
        (f"{EVIL}, evaluation", 0, [3]),
        ("b", 1, [2, 1, 0.5]),
        ("b, evaluation", 1, [6]),
    ]
    assert [each["name"] for each in parsed.charts[-1]["curves"]] == ["b"]
    # Captions and headings of columns, then a row for each setting that differs.
    settings = parsed.sections["settings"].partition("setting\n")[2].split()
    assert settings[: settings.index("Smoothing,")] == [
        *(*EVIL.split(), "b", "schedule", "1F1B", "ZBH1", "config.rate", "1", "2")
    ]
    figures = parsed.sections["figures"].split()
    assert {"0.2500", "0.5000", "3.000", "6.000", "50.00"} <= set(figures)


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "first" / "run", tmp_path / "second" / "run"]
    assert short_names(folders) == ["first/run", "second/run"]
    assert short_names(folders[:1]) == ["run"]


def test_the_command_compares(tmp_path: Path, capsys: Capture) -> None:
    folders = [str(run(tmp_path / name, 1.0, "1F1B")) for name in "ab"]
    page = tmp_path / "page.html"
    assert main(["report", *folders, "-o", str(page)]) == 0
    assert "No setting that the runs recorded." in Parsed(page.read_text()).sections["settings"]
    assert "fleetpipe: b: No step was traced" in capsys.readouterr().err
    setting = str(run(tmp_path / "setting", 1.0, "FThenB"))
    assert main(["report", folders[0], setting, "-o", str(page)]) == 0
    assert re.search(r"schedule\s+1F1B\s+FThenB", Parsed(page.read_text()).sections["settings"])
    assert main(["report", folders[0], folders[0], "-o", str(page)]) == 2
    assert "one folder is given twice" in capsys.readouterr().err
