"""The page of a run: what its template is filled with, from its head to its versions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from fleetpipe.report import run_charts, tables
from fleetpipe.report.drawing import drawings
from fleetpipe.report.numbers import moment, percent, seconds, short, size
from fleetpipe.report.run import Row, RunFolder
from fleetpipe.schedules.forms.events import figures_of
from fleetpipe.version import __version__

_SETTINGS = {
    "configuration": ("config", "training", "layout", "environment"),
    "versions": ("versions",),
}


@cache
def templates_of(package: str) -> Environment:
    """Returns what reads a package's templates, and these: what they are filled with is escaped."""
    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader(name) for name in dict.fromkeys([package, __package__])]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(short=short, size=size, seconds=seconds)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def page(run: RunFolder, now: float | None = None) -> str:
    """Returns the page as the text of an HTML file, which loads nothing.

    Args:
        run: What :func:`fleetpipe.report.run.read` returned.
        now: The moment that the page says it is of, in seconds since 1970; None: this one.
    """
    at = time.time() if now is None else now
    status, kind = status_of(run, at)
    command = run.about.get("command")
    template = templates_of(__package__).get_template("page.html")
    text: str = template.render(
        run=run,
        status=status,
        kind=kind,
        command=" ".join(map(str, command)) if isinstance(command, list) else "",
        tiles=[(name, value) for name, value in _tiles(run) if value],
        learning=run_charts.learning({run.name: run}),
        machine=run_charts.machine({run.name: run}),
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
    return text


def status_of(run: RunFolder, now: float) -> tuple[str, str]:
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
        elapsed = run_charts.elapsed_seconds(run, [run.last])
        yield "elapsed", seconds(elapsed[-1]) if elapsed else ""
    if run.train:
        yield "training loss", _figure(run.train[-1], run_charts.LOSS)
    for name in run_charts.metrics(run)[:3]:
        rows = [row for row in run.evaluations or run.train if name in row.figures]
        where = "evaluation" if run.evaluations else "training"
        yield f"{name}, {where}", _figure(rows[-1], name) if rows else ""
    if run.train:
        for name, unit in run_charts.THROUGHPUT.items():
            yield unit, _figure(run.train[-1], name)
    if run.pipeline is not None:
        what = "measured" if run.pipeline.measured else "predicted"
        events = run.pipeline.measured or run.pipeline.predicted
        yield f"bubble, {what}", percent(figures_of(events).bubble_rate)
    if run.attempts:
        yield "restarts", str(len(run.attempts) - 1)


def _figure(row: Row, name: str) -> str:
    return short(row.figures[name]) if name in row.figures else ""


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
