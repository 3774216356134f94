"""The page of several runs: their curves in the same charts, final figures, and what differs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetpipe.report import run_charts, tables
from fleetpipe.report.numbers import aligned, moment, seconds
from fleetpipe.report.page import status_of, templates_of
from fleetpipe.report.run import RunFolder
from fleetpipe.version import __version__

#: Parts of ``run.json`` that are compared; its stages and the text of its schedule are not.
_SECTIONS = ("config", "training", "layout", "environment", "versions")


def named(folders: Sequence[Path]) -> list[str]:
    """Returns a name for each folder: the end of its path that tells it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(folders)


def compared(runs: Mapping[str, RunFolder], now: float | None = None) -> str:
    """Returns the page of some runs as the text of an HTML file, which loads nothing.

    Args:
        runs: Two or more, by their names.
        now: The moment that the page says it is of, in seconds since 1970; None: this one.
    """
    at = time.time() if now is None else now
    text: str = (
        templates_of(__package__)
        .get_template("compare.html")
        .render(
            names=list(runs),
            colours=run_charts.MOST_COLOURS,
            learning=run_charts.learning(runs),
            machine=run_charts.machine(runs),
            figures=_figures(runs, at),
            settings=_settings(runs),
            version=__version__,
            written=moment(at),
        )
    )
    return text


def _figures(runs: Mapping[str, RunFolder], now: float) -> list[tables.Column]:
    """Returns a row for each run: how it ended, and its last figures."""
    lasts = [[run.last] if run.last else [] for run in runs.values()]
    lasted = [run_charts.elapsed_seconds(run, last) for run, last in zip(runs.values(), lasts)]
    columns = [
        tables.Column("run", list(runs), False),
        tables.Column("end", [status_of(run, now)[0] for run in runs.values()], False),
        tables.Column("steps", [f"{last[0].step:,}" if last else "" for last in lasts]),
        tables.Column("elapsed", [seconds(each[-1]) if each else "" for each in lasted]),
        tables.Column("restarts", [str(max(0, len(run.attempts) - 1)) for run in runs.values()]),
    ]
    names = dict.fromkeys(name for run in runs.values() for name in run_charts.metrics(run))
    for name in (run_charts.LOSS, *names, *run_charts.THROUGHPUT, run_charts.BUBBLE):
        for phase in ("training", "evaluation"):
            columns.append(
                tables.Column(f"{run_charts.titled(name)}, {phase}", _last(runs, name, phase))
            )
    return tables.table(columns)


def _last(runs: Mapping[str, RunFolder], name: str, phase: str) -> list[str]:
    """Returns the last figure of each run under a name, in one number of decimals."""
    last = {}
    for title, run in runs.items():
        rows = run.train if phase == "training" else run.evaluations
        figures = [row.figures[name] for row in rows if name in row.figures]
        if figures:
            last[title] = figures[-1]
    texts = dict(zip(last, aligned(list(last.values()))))
    return [texts.get(title, "") for title in runs]


def _settings(runs: Mapping[str, RunFolder]) -> list[tables.Column]:
    """Returns a row for each setting that is not the same in all runs; nothing if all are."""
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
