"""Computes the contents of the page of a run, which a template then shows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import median

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fleetpipe.contrib.view.judging.answers import alive, answers_of, points_of
from fleetpipe.contrib.view.reading.history import EVALUATED
from fleetpipe.contrib.view.reading.run_folder import Row, RunFolder
from fleetpipe.contrib.view.showing import tables
from fleetpipe.contrib.view.showing.chart import Chart, Curve, chart, with_mean
from fleetpipe.contrib.view.showing.drawing import drawings
from fleetpipe.contrib.view.showing.numbers import align, moment, percent, seconds, short, size
from fleetpipe.schedules.forms.events import figures_of
from fleetpipe.version import __version__

_SETTINGS = {
    "configuration": ("config", "training", "layout", "environment"),
    "versions": ("versions",),
}


@cache
def template(name: str) -> Template:
    """Returns a template of this package; values in it are escaped."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(short=short, size=size, seconds=seconds)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(name)


def page(run: RunFolder, now: float | None = None) -> str:
    """Returns the page of a run as an HTML text that loads no other file.

    Args:
        run: A result of :func:`fleetpipe.contrib.view.reading.run_folder.read`.
        now: The date of the page, in seconds since 1970; None: the present time.
    """
    at = time.time() if now is None else now
    command = run.about.get("command")
    return template("page.html").render(
        run=run,
        answers=answers_of(run.board, _points_by_name(run), at),
        command=" ".join(map(str, command)) if isinstance(command, list) else "",
        tiles=[(name, value) for name, value in _tiles(run) if value],
        learning=learning({run.name: run}),
        machine=machine({run.name: run}),
        schedule=_schedule(run),
        drawings=drawings(run.pipeline) if run.pipeline else [],
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


def _points_by_name(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """Returns the steps and figures of a run by name, those of evaluations too."""
    figures = points_of(run.board.history)
    for prefix, rows in (("", run.train), (EVALUATED, run.evaluations)):
        for name in {name: None for row in rows for name in row.figures}:
            figures[prefix + name] = [(r.step, r.figures[name]) for r in rows if name in r.figures]
    return figures


def _tiles(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yields the most important figures."""
    training = run.section("training")
    if run.last is not None:
        sizes = [training.get("batches_per_epoch"), training.get("epochs")]
        whole = [n for n in sizes if isinstance(n, int)]
        of = f" of {whole[0] * whole[1]:,}" if len(whole) == 2 else ""
        yield "steps", f"{run.last.step:,}{of}"
        elapsed = elapsed_seconds(run, [run.last])
        yield "elapsed", seconds(elapsed[-1]) if elapsed else ""
    if run.train:
        yield "training loss", _figure(run.train[-1], LOSS)
    for name in metrics(run)[:3]:
        rows = [row for row in run.evaluations or run.train if name in row.figures]
        where = "evaluation" if run.evaluations else "training"
        yield f"{name}, {where}", _figure(rows[-1], name) if rows else ""
    if run.train:
        for name, unit in THROUGHPUT.items():
            yield unit, _figure(run.train[-1], name)
    if run.pipeline is not None:
        what = "measured" if run.pipeline.measured else "predicted"
        events = run.pipeline.measured or run.pipeline.predicted
        yield f"bubble, {what}", percent(figures_of(events).bubble_rate)
    if run.attempts:
        yield "restarts", str(len(run.attempts) - 1)
    if run.saved is not None:
        yield f"hash of step {run.saved[0]:,}", run.saved[1]


def _figure(row: Row, name: str) -> str:
    return short(row.figures[name]) if name in row.figures else ""


def _schedule(run: RunFolder) -> str:
    """Describes the schedule in a line."""
    name = run.section("schedule").get("name")
    if run.pipeline is None or not name:
        return ""
    placement = run.pipeline.placement
    chunks = f", {placement.chunks} chunks on each" if placement.chunks > 1 else ""
    count = run.section("training").get("micro_batches")
    micro_batches = f", {count} micro-batches" if count else ""
    return f"{name}, {placement.ranks} ranks{chunks}{micro_batches}"


def _settings(run: RunFolder) -> dict[str, list[tuple[str, list[tuple[str, str]]]]]:
    """Returns the settings under their headings, by section; each once."""
    shown: set[tuple[str, str]] = set()
    return {
        section: [
            (heading, pairs)
            for part in parts
            for heading, pairs in tables.grouped_settings(run.section(part), part, shown)
        ]
        for section, parts in _SETTINGS.items()
    }


#: Parts of ``run.json`` that are compared; its stages and the text of its schedule are not.
_SECTIONS = ("config", "training", "layout", "environment", "versions")


def short_names(folders: Sequence[Path]) -> list[str]:
    """Returns a name for each folder: the shortest end of its path that is unique."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(folders)


def comparison(runs: Mapping[str, RunFolder], now: float | None = None) -> str:
    """Returns a page that compares some runs as an HTML text that loads no other file.

    Args:
        runs: Two or more, by their names.
        now: The date of the page, in seconds since 1970; None: the present time.
    """
    at = time.time() if now is None else now
    return template("compare.html").render(
        names=list(runs),
        colours=MOST_COLOURS,
        learning=learning(runs),
        machine=machine(runs),
        figures=_figures(runs, at),
        settings=_differing(runs),
        version=__version__,
        written=moment(at),
    )


def _figures(runs: Mapping[str, RunFolder], now: float) -> list[tables.Column]:
    """Returns table columns with a row for each run: how it ended, and its last figures."""
    lasts = [[run.last] if run.last else [] for run in runs.values()]
    lasted = [elapsed_seconds(run, last) for run, last in zip(runs.values(), lasts)]
    columns = [
        tables.Column("run", list(runs), False),
        tables.Column("end", [alive(run.board, now).text for run in runs.values()], False),
        tables.Column("steps", [f"{last[0].step:,}" if last else "" for last in lasts]),
        tables.Column("elapsed", [seconds(each[-1]) if each else "" for each in lasted]),
        tables.Column("restarts", [str(max(0, len(run.attempts) - 1)) for run in runs.values()]),
        tables.Column("hash", [run.saved[1] if run.saved else "" for run in runs.values()], False),
    ]
    names = dict.fromkeys(name for run in runs.values() for name in metrics(run))
    for name in (LOSS, *names, *THROUGHPUT, BUBBLE):
        for phase in ("training", "evaluation"):
            columns.append(tables.Column(f"{title_of(name)}, {phase}", _last(runs, name, phase)))
    return tables.table(columns)


def _last(runs: Mapping[str, RunFolder], name: str, phase: str) -> list[str]:
    """Returns the last value of a figure of each run, with the same number of decimals."""
    last = {}
    for title, run in runs.items():
        rows = run.train if phase == "training" else run.evaluations
        figures = [row.figures[name] for row in rows if name in row.figures]
        if figures:
            last[title] = figures[-1]
    texts = dict(zip(last, align(list(last.values()))))
    return [texts.get(title, "") for title in runs]


def _differing(runs: Mapping[str, RunFolder]) -> list[tables.Column]:
    """Returns table columns with a row for each setting in which the runs differ."""
    by_run = {}
    for title, run in runs.items():
        values = {"schedule": run.section("schedule").get("name")}
        values.update({part: run.section(part) for part in _SECTIONS})
        by_run[title] = dict(tables.settings(values))
    names = dict.fromkeys(name for settings in by_run.values() for name in settings)
    differing = [
        name for name in names if len({settings.get(name) for settings in by_run.values()}) > 1
    ]
    if not differing:
        return []
    return [
        tables.Column("setting", differing, False),
        *(
            tables.Column(title, [settings.get(name, "none") for name in differing], False)
            for title, settings in by_run.items()
        ),
    ]


LOSS, RATE, NORM, BUBBLE = "loss", "learning_rate", "gradient_norm", "bubble_rate"
THROUGHPUT = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
#: Figures of the machine, which are no metrics of the model.
_MACHINE = (*THROUGHPUT, BUBBLE, "peak_held")
_TITLES = {
    RATE: "learning rate",
    BUBBLE: "bubble",
    NORM: "gradient norm",
    **dict.fromkeys(THROUGHPUT, "throughput"),
}
#: Lists with a figure of each rank: title, name of a curve, unit, and factor.
_BY_RANK = {
    "busy_share_by_rank": ("busy share", "rank", "%", 100.0),
    "peak_memory_by_process": ("peak memory", "process", "GB", 1e-9),
}
#: Of any clock, in seconds since 1970.
_LAST_MOMENT = 1e11
#: Of more ranks the least, the median and the most are drawn; there are as many colours.
MOST_COLOURS = 8


def title_of(name: str) -> str:
    """Returns the page's name for a figure."""
    return _TITLES.get(name, name)


def metrics(run: RunFolder) -> list[str]:
    """Returns the names of the user's metrics, without the loss."""
    rows = chain(run.train[-1:], run.evaluations[-1:], run.train[:1])
    names = dict.fromkeys(name for row in rows for name in row.figures)
    return [name for name in names if name not in (LOSS, RATE, NORM, *_MACHINE)]


def learning(runs: Mapping[str, RunFolder]) -> list[Chart]:
    """Returns the charts of loss, metrics, learning rate and gradient norm."""
    names = dict.fromkeys(name for run in runs.values() for name in metrics(run))
    return list(_charts(runs, [LOSS, *names, RATE, NORM]))


def machine(runs: Mapping[str, RunFolder]) -> list[Chart]:
    """Returns the charts of throughput and bubble; for a single run also those of each rank."""
    charts = list(_charts(runs, [*THROUGHPUT, BUBBLE]))
    if len(runs) == 1:
        charts += chain.from_iterable(map(_of_ranks, runs.values()))
    return charts


def _began(run: RunFolder) -> float:
    """Returns when a run began, in seconds since 1970; 0 if unknown."""
    moments = [*(each.began for each in run.attempts[:1]), *(row.time for row in run.train[:1])]
    return min(filter(_is_moment, moments), default=0.0)


def _is_moment(value: float) -> bool:
    return 0 < value < _LAST_MOMENT


def _charts(runs: Mapping[str, RunFolder], names: Sequence[str]) -> Iterator[Chart]:
    """Yields a chart for each figure that exists; each of several runs has its colour."""
    several = len(runs) > 1
    for name in names:
        factor = 100.0 if name == BUBBLE else 1.0
        curves: list[Curve] = []
        for place, (title, run) in enumerate(runs.items()):
            colours = [place % MOST_COLOURS] * 2 if several else [0, 1]
            titles = [title, f"{title}, evaluation"] if several else ["training", "evaluation"]
            xs, ys, times = _points(run, run.train, name, factor)
            if xs:
                curve = Curve(titles[0], xs, ys, "line", colours[0], times)
                curves += with_mean(curve) if name == LOSS and not several else [curve]
            xs, ys, times = _points(run, run.evaluations, name, factor)
            if xs:
                curves.append(Curve(titles[1], xs, ys, "points", colours[1], times))
        if curves:
            unit = "%" if name == BUBBLE else THROUGHPUT.get(name, "")
            yield chart(title_of(name), curves, unit, [] if several else _stops(run))


def _points(
    run: RunFolder, rows: Sequence[Row], name: str, factor: float
) -> tuple[list[int], list[float], list[float]]:
    """Returns the steps, the values and the elapsed seconds of a figure in some rows."""
    chosen = [row for row in rows if name in row.figures]
    ys = [row.figures[name] * factor for row in chosen]
    return [row.step for row in chosen], ys, elapsed_seconds(run, chosen)


def elapsed_seconds(run: RunFolder, rows: Sequence[Row]) -> list[float]:
    """Returns how long the run had lasted at each row; an empty list if unknown."""
    begin = _began(run)
    if not begin or not all(_is_moment(row.time) for row in rows):
        return []
    return [max(0.0, row.time - begin) for row in rows]


def _of_ranks(run: RunFolder) -> Iterator[Chart]:
    for name, (title, what, unit, factor) in _BY_RANK.items():
        rows = [row for row in run.train if name in row.lists]
        count = min((len(row.lists[name]) for row in rows), default=0)
        lists = [[factor * number for number in row.lists[name]] for row in rows]
        columns = {f"{what} {rank}": [each[rank] for each in lists] for rank in range(count)}
        if count > MOST_COLOURS:
            columns = {
                f"least of {count}": [min(each) for each in lists],
                f"median of {count}": [median(each) for each in lists],
                f"most of {count}": [max(each) for each in lists],
            }
        xs, times = [row.step for row in rows], elapsed_seconds(run, rows)
        curves = [
            Curve(each, xs, ys, "line", place, times)
            for place, (each, ys) in enumerate(columns.items())
        ]
        if curves:
            yield chart(f"{title} by {what}", curves, unit, _stops(run))


def _stops(run: RunFolder) -> list[int]:
    return [attempt.step for attempt in run.attempts[1:]]
