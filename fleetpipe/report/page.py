"""The page of a run: what its template is filled with, from its head to its versions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

from jinja2 import Environment, PackageLoader, StrictUndefined

from fleetpipe.report import tables
from fleetpipe.report.chart import Chart, chart
from fleetpipe.report.curves import Curve, with_mean
from fleetpipe.report.drawing import drawing
from fleetpipe.report.numbers import moment, percent, seconds, short, size
from fleetpipe.report.run import Row, RunFolder
from fleetpipe.schedules.forms.events import figures_of
from fleetpipe.version import __version__

_LOSS, _RATE, _BUBBLE = "loss", "learning_rate", "bubble_rate"
_UNITS = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
_TITLES = {_RATE: "learning rate", _BUBBLE: "bubble", **dict.fromkeys(_UNITS, "throughput")}
#: Figures of the machine, which are no metrics of the model.
_MACHINE = (*_UNITS, _BUBBLE, "peak_held")
_SETTINGS = {
    "configuration": ("config", "training", "layout", "environment"),
    "versions": ("versions",),
}


@cache
def templates() -> Environment:
    """Returns what reads the templates: whatever they are filled with is escaped."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(short=short, size=size)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def page(run: RunFolder, now: float | None = None) -> str:
    """Returns the page as the text of an HTML file, which loads nothing.

    Args:
        run: What :func:`fleetpipe.report.run.read` returned.
        now: The moment that the page says it is of, in seconds since 1970; None: this one.
    """
    at = time.time() if now is None else now
    status, kind = _status(run, at)
    command = run.about.get("command")
    template = templates().get_template("page.html")
    text: str = template.render(
        run=run,
        status=status,
        kind=kind,
        command=" ".join(map(str, command)) if isinstance(command, list) else "",
        tiles=[(name, value) for name, value in _tiles(run) if value],
        learning=list(_charts(run, [_LOSS, *_metrics(run), _RATE])),
        machine=list(_charts(run, [*_UNITS, _BUBBLE])),
        schedule=_schedule(run),
        drawing=drawing(run.pipeline) if run.pipeline else None,
        ranks=tables.ranks(run),
        memory=run.train[-1].lists.get("peak_memory_by_process", []) if run.train else [],
        on_gpu=run.section("layout").get("device") == "gpu",
        attempts=tables.attempts(run.attempts),
        slow=tables.slow(run.slow),
        evaluations=tables.evaluations(run.evaluations),
        settings=_settings(run),
        version=__version__,
        written=moment(at),
    )
    return text


def _status(run: RunFolder, now: float) -> tuple[str, str]:
    """Returns how the run is doing, in words, and whether that is good."""
    attempt = run.attempts[-1] if run.attempts else None
    if attempt is not None and attempt.ended is not None:
        return attempt.outcome, "bad" if attempt.failed else "good"
    if run.last is None:
        return "nothing is known of its end", "open"
    ago = seconds(max(0.0, now - run.last.time))
    return f"still running, or died without a word: the last row is {ago} old", "open"


def _tiles(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yields the figures that are looked for first."""
    training = run.section("training")
    if run.last is not None:
        sizes = [training.get("batches_per_epoch"), training.get("epochs")]
        whole = [n for n in sizes if isinstance(n, int)]
        of = f" of {whole[0] * whole[1]:,}" if len(whole) == 2 else ""
        yield "steps", f"{run.last.step:,}{of}"
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
        what = "measured" if run.pipeline.measured else "predicted"
        yield f"bubble, {what}", percent(figures_of(run.pipeline.tracks[what]).bubble_rate)
    if run.attempts:
        yield "restarts", str(len(run.attempts) - 1)


def _figure(row: Row, name: str) -> str:
    return short(row.figures[name]) if name in row.figures else ""


def _metrics(run: RunFolder) -> list[str]:
    """Returns the names of what the user measures, beside the loss."""
    rows = chain(run.train[-1:], run.evaluations[-1:], run.train[:1])
    names = dict.fromkeys(name for row in rows for name in row.figures)
    return [name for name in names if name not in (_LOSS, _RATE, *_MACHINE)]


def _schedule(run: RunFolder) -> str:
    """Returns what the pipeline runs, in a line."""
    name = run.section("schedule").get("name")
    if run.pipeline is None or not name:
        return ""
    placement = run.pipeline.placement
    chunks = f", {placement.chunks} chunks on each" if placement.chunks > 1 else ""
    count = run.section("training").get("micro_batches")
    micro_batches = f", {count} micro-batches" if count else ""
    return f"{name}, {placement.ranks} ranks{chunks}{micro_batches}"


def _settings(run: RunFolder) -> dict[str, list[list[tuple[str, str]]]]:
    """Returns the lists of settings that there are, by section."""
    return {
        name: [list(tables.settings(run.section(part))) for part in parts if run.section(part)]
        for name, parts in _SETTINGS.items()
    }


def _charts(run: RunFolder, names: Sequence[str]) -> Iterator[Chart]:
    """Yields a chart for each figure that there is."""
    marks = [attempt.step for attempt in run.attempts[1:]]
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
    points = [(row.step, row.figures[name] * factor) for row in rows if name in row.figures]
    if not points:
        return []
    xs, ys = zip(*points)
    if colour:
        return [Curve(label, xs, ys, "points", colour)]
    curve = Curve(label, xs, ys)
    return with_mean(curve) if name == _LOSS else [curve]
