"""The page of a run, from its head to its versions: one file that loads nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from fleetpipe.report import tables
from fleetpipe.report.chart import chart
from fleetpipe.report.curves import Curve, with_mean
from fleetpipe.report.drawing import drawing
from fleetpipe.report.markup import Child, Element, element, written
from fleetpipe.report.numbers import moment, percent, seconds, short
from fleetpipe.report.run import Row, Run
from fleetpipe.schedules.forms.events import figures_of
from fleetpipe.version import __version__

#: Whatever the page holds, it loads nothing from anywhere.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)
_LOSS, _RATE, _BUBBLE = "loss", "learning_rate", "bubble_rate"
_UNITS = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
_TITLES = {_RATE: "learning rate", _BUBBLE: "bubble", **dict.fromkeys(_UNITS, "throughput")}
_MOST_UNFOLDED = 10
#: Figures of the machine, which are no metrics of the model.
_MACHINE = (*_UNITS, _BUBBLE, "peak_held")


def page(run: Run, now: float | None = None) -> str:
    """Returns the page as the text of an HTML file.

    Args:
        run: What :func:`fleetpipe.report.run.read` found.
        now: The moment that the page says it is of, in seconds since 1970; None: this one.
    """
    moment_of_page = time.time() if now is None else now
    home = Path(__file__)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{run.name}: a run of fleetpipe"),
        element("style", home.with_name("page.css").read_text(encoding="utf-8")),
    )
    footer = f"fleetpipe {__version__} wrote this page on {moment(moment_of_page)} UTC"
    body = element(
        "body",
        element("header", *_head(run, moment_of_page)),
        element("main", *_sections(run)),
        element("footer", footer),
        element("script", home.with_name("page.js").read_text(encoding="utf-8")),
    )
    return written(element("html", head, body, lang="en"))


def _head(run: Run, now: float) -> Iterator[Element]:
    yield element("p", "fleetpipe report", class_="kind")
    yield element("h1", run.name)
    status, kind = _status(run, now)
    yield element("p", element("b", status, class_=kind), class_="status")
    command = run.about.get("command")
    if isinstance(command, list):
        yield element("p", element("code", " ".join(map(str, command))), class_="command")
    tiles = [(name, value) for name, value in _tiles(run) if value]
    pairs = (element("div", element("dt", n), element("dd", v)) for n, v in tiles)
    yield element("dl", *pairs, class_="tiles")


def _status(run: Run, now: float) -> tuple[str, str]:
    """Returns how the run stands, in words, and whether that is good."""
    life = run.lives[-1] if run.lives else None
    if life is not None and life.ended is not None:
        return (life.outcome, "bad") if life.failed else (life.outcome, "good")
    if run.last is None:
        return "nothing is known of its end", "open"
    ago = seconds(max(0.0, now - run.last.time))
    return f"still running, or died without a word: the last row is {ago} old", "open"


def _tiles(run: Run) -> Iterator[tuple[str, str]]:
    """Yields the figures that are looked for first."""
    training = run.section("training")
    if run.last is not None:
        steps, per_epoch = run.last.step, training.get("batches_per_epoch")
        epochs = training.get("epochs")
        whole = [n for n in (per_epoch, epochs) if isinstance(n, int)]
        of = f" of {whole[0] * whole[1]:,}" if len(whole) == 2 else ""
        yield "steps", f"{steps:,}{of}"
    if run.train:
        yield "training loss", _figure(run.train[-1], _LOSS)
    for name in _metrics(run)[:3]:
        rows = [row for row in run.evaluations or run.train if name in row.figures]
        where = "evaluation" if run.evaluations else "training"
        yield f"{name}, {where}", _figure(rows[-1], name) if rows else ""
    if run.train:
        for name, unit in _UNITS.items():
            yield unit, _figure(run.train[-1], name)
    if run.pipeline is not None:
        events = run.pipeline.measured or run.pipeline.predicted
        what = "measured" if run.pipeline.measured else "predicted"
        yield f"bubble, {what}", percent(figures_of(events).bubble_rate)
    if run.lives:
        yield "restarts", str(len(run.lives) - 1)


def _figure(row: Row, name: str) -> str:
    return short(row.figures[name]) if name in row.figures else ""


def _metrics(run: Run) -> list[str]:
    """Returns the names of what the user measures, beside the loss."""
    rows = chain(run.train[-1:], run.evaluations[-1:], run.train[:1])
    names = dict.fromkeys(name for row in rows for name in row.figures)
    return [name for name in names if name not in (_LOSS, _RATE, *_MACHINE)]


def _sections(run: Run) -> Iterator[Element]:
    if run.notes:
        items = (element("li", note) for note in run.notes)
        yield _section("missing", "What is missing here, and why", element("ul", *items))
    learning = [*_charts(run, [_LOSS, *_metrics(run), _RATE])]
    if learning:
        yield _section("curves", "Learning", element("div", *learning, class_="charts"))
    machine = [*_charts(run, [*_UNITS, _BUBBLE])]
    if machine:
        yield _section("throughput", "Throughput", element("div", *machine, class_="charts"))
    if run.pipeline is not None:
        yield _section("pipeline", "Pipeline", _schedule(run), drawing(run.pipeline))
    ranks, memory = tables.ranks(run), tables.memory(run)
    if ranks is not None:
        yield _section("ranks", "Ranks of the pipeline", ranks)
    if memory is not None:
        yield _section("memory", "Memory", memory, _memory_text(run))
    if run.lives:
        yield _section("lives", "Attempts", tables.lives(run.lives))
    if run.evaluations:
        yield _section("evaluations", "Evaluations", _evaluations(run))
    for name, parts in (
        ("configuration", ("config", "training", "layout", "environment")),
        ("versions", ("versions",)),
    ):
        found = [run.section(part) for part in parts if run.section(part)]
        if found:
            yield _section(name, name.capitalize(), *map(tables.settings, found))


def _section(name: str, title: str, *children: Child) -> Element:
    return element("section", element("h2", title), *children, id=name)


def _evaluations(run: Run) -> Element:
    """Returns the table, folded where it would take the room of all else."""
    shown = tables.evaluations(run.evaluations)
    if len(run.evaluations) <= _MOST_UNFOLDED:
        return shown
    return element("details", element("summary", f"all {len(run.evaluations)}"), shown)


def _schedule(run: Run) -> Element | None:
    name = run.section("schedule").get("name")
    if run.pipeline is None or not name:
        return None
    placement = run.pipeline.placement
    chunks = f", {placement.chunks} chunks on each" if placement.chunks > 1 else ""
    count = run.section("training").get("micro_batches")
    micro_batches = f", {count} micro-batches" if count else ""
    text = f"{name}, {placement.ranks} ranks{chunks}{micro_batches}"
    return element("p", text, class_="said")


def _memory_text(run: Run) -> Element:
    gpu = run.section("layout").get("device") == "gpu"
    text = (
        "The most that Paddle allocated on the GPU."
        if gpu
        else ("The most resident memory of the process, with the libraries that it loaded.")
    )
    return element("p", text, class_="said")


def _charts(run: Run, names: Sequence[str]) -> Iterator[Element]:
    """Yields a chart for each figure that there is."""
    marks = [life.step for life in run.lives[1:]]
    for name in names:
        factor = 100.0 if name == _BUBBLE else 1.0
        curves = [
            *_curves("training", run.train, name, 0, factor),
            *_curves("evaluation", run.evaluations, name, 1, factor),
        ]
        if curves:
            unit = "%" if name == _BUBBLE else _UNITS.get(name, "")
            yield chart(_TITLES.get(name, name), curves, unit, marks)


def _curves(
    label: str, rows: Sequence[Row], name: str, colour: int, factor: float
) -> Sequence[Curve]:
    found = [(row.step, row.figures[name] * factor) for row in rows if name in row.figures]
    if not found:
        return []
    xs, ys = zip(*found)
    if colour:
        return [Curve(label, xs, ys, "points", colour)]
    curve = Curve(label, xs, ys)
    return with_mean(curve) if name == _LOSS else [curve]
