"""Computes the contents of the pages, live or saved, which templates then show."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fleetpipe.contrib.view.judging.answers import Answer, answers_of, events_of
from fleetpipe.contrib.view.reading.history import EVALUATED
from fleetpipe.contrib.view.reading.run_record import RunRecord
from fleetpipe.contrib.view.showing import tables
from fleetpipe.contrib.view.showing.chart import (
    LOSS,
    MOST_COLOURS,
    THROUGHPUT,
    learning,
    machine,
    metrics,
    title_of,
)
from fleetpipe.contrib.view.showing.drawing import drawings
from fleetpipe.contrib.view.showing.numbers import align, moment, percent, seconds, short
from fleetpipe.schedules.forms.events import figures_of
from fleetpipe.version import __version__

#: Parts of ``run.json`` that are shown and compared; its stages and its schedule's text are not.
_SECTIONS = ("config", "training", "layout", "environment", "versions")


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
    environment.filters["short"] = short
    environment.globals["live"] = False
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.get_template(name)


def page(run: RunRecord, now: float | None = None, live: bool = False) -> str:
    """Returns the page of a run as an HTML text that loads no other file.

    Args:
        run: What is recorded of it.
        now: The date of the page, in seconds since 1970; None: the present time.
        live: Whether the page asks again and again for what has changed.
    """
    at = time.time() if now is None else now
    command = run.about.get("command")
    board = run.board
    return template("page.html").render(
        run=run,
        live=live,
        answers=[*answers_of(run, at), *_more_answers(run)],
        command=" ".join(map(str, command)) if isinstance(command, list) else "",
        learning=learning({run.name: run}),
        machine=machine({run.name: run}),
        ranks=tables.present(board.ranks),
        schedule=_schedule(run),
        drawings=drawings(run.pipeline) if run.pipeline else [],
        stages=tables.stages(run),
        attempts=tables.attempts(board.attempts),
        events=tables.events(events_of(board)),
        evaluations=tables.evaluations(run.evaluations),
        settings={part: list(tables.settings(run.section(part))) for part in _SECTIONS},
        version=__version__,
        written=moment(at),
    )


def _more_answers(run: RunRecord) -> list[Answer]:
    """Returns what only the files of a run tell."""
    answers = []
    for name in metrics(run):
        figures = [(run.series.get(prefix + name), prefix) for prefix in (EVALUATED, "")]
        of = {EVALUATED: " in the evaluation", "": ""}
        texts = [f"{short(one.values[-1])}{of[prefix]}" for one, prefix in figures if one]
        answers.append(Answer(name, ", ".join(texts)))
    elapsed = run.elapsed([*run.train[-1:], *run.evaluations[-1:]])
    if elapsed:
        answers.append(Answer("elapsed", seconds(max(elapsed))))
    if run.pipeline is not None:
        what = "measured" if run.pipeline.measured else "predicted"
        events = run.pipeline.measured or run.pipeline.predicted
        answers.append(Answer("bubble", f"{percent(figures_of(events).bubble_rate)}, {what}"))
    if run.saved is not None:
        answers.append(Answer("hash", f"{run.saved[1]}, of step {run.saved[0]:,}"))
    return answers


def _schedule(run: RunRecord) -> str:
    """Describes the schedule in a line."""
    name = run.section("schedule").get("name")
    if run.pipeline is None or not name:
        return ""
    placement = run.pipeline.placement
    chunks = f", {placement.chunks} chunks on each" if placement.chunks > 1 else ""
    count = run.section("training").get("micro_batches")
    micro_batches = f", {count} micro-batches" if count else ""
    return f"{name}, {placement.ranks} ranks{chunks}{micro_batches}"


def short_names(folders: Sequence[Path]) -> list[str]:
    """Returns a name for each folder: the shortest end of its path that is unique."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(folders)


def comparison(runs: Mapping[str, RunRecord], now: float | None = None) -> str:
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
        figures=_last_figures(runs, at),
        settings=_differing(runs),
        version=__version__,
        written=moment(at),
    )


def _last_figures(runs: Mapping[str, RunRecord], now: float) -> list[tables.Column]:
    """Returns table columns with a row for each run: how it ended, and its last figures."""
    answers = [[*answers_of(run, now), *_more_answers(run)] for run in runs.values()]
    columns = [tables.Column("run", list(runs), False)]
    for question in ("state", "done", "elapsed", "hash"):
        texts = [{one.question: one.text for one in each} for each in answers]
        columns.append(tables.Column(question, [text.get(question, "") for text in texts], False))
    names = dict.fromkeys(name for run in runs.values() for name in metrics(run))
    for name in (LOSS, *names, *THROUGHPUT):
        for prefix, phase in (("", "training"), (EVALUATED, "evaluation")):
            series = [run.series.get(prefix + name) for run in runs.values()]
            aligned = iter(align([one.values[-1] for one in series if one]))
            cells = [next(aligned) if one else "" for one in series]
            columns.append(tables.Column(f"{title_of(name)}, {phase}", cells))
    return tables.table(columns)


def _differing(runs: Mapping[str, RunRecord]) -> list[tables.Column]:
    """Returns table columns with a row for each setting in which the runs differ."""
    by_run: dict[str, dict[str, str]] = {}
    for title, run in runs.items():
        values: dict[str, Any] = {"schedule": run.section("schedule").get("name")}
        values.update({part: run.section(part) for part in _SECTIONS})
        by_run[title] = dict(tables.settings(values))
    names = dict.fromkeys(name for settings in by_run.values() for name in settings)
    differing = [name for name in names if len({each.get(name) for each in by_run.values()}) > 1]
    columns = [tables.Column("setting", differing, False)]
    for title, each in by_run.items():
        cells = [each.get(name, "none") for name in differing]
        columns.append(tables.Column(title, cells, False))
    return tables.table(columns)
