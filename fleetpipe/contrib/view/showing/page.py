"""Makes the HTML pages: of a run, live or saved (``page``), and of several runs (``comparison``).

It computes the cells of their tables; the markup is in ``templates``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from fleetpipe.contrib.view.answers import Answer, answers_of, events_of
from fleetpipe.contrib.view.board import Row, RunRecord
from fleetpipe.contrib.view.history import EVALUATED, AttemptRecord, RunEvent
from fleetpipe.contrib.view.showing import drawing
from fleetpipe.job.records import RankRecord
from fleetpipe.schedules.forms.trace import figures_of
from fleetpipe.version import __version__

#: The most letters of the names of a stage's layers.
_MOST_LETTERS = 60
#: The most levels of nested settings; deeper ones are written as Python does.
_MOST_LEVELS = 8

#: The sections of ``run.json`` whose settings are shown and compared.
_SECTIONS = ("config", "training", "layout", "environment", "versions")

#: The headings of columns of texts; others hold numbers.
_TEXTS = (
    *("run", "state", "done", "elapsed", "hash", "stages", "layers", "action"),
    *("began (UTC)", "end", "time (UTC)", "event"),
)


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: Its heading.
        cells: The texts, or values for which the template has markup; an empty one is left blank.
        number: Whether the cells are numbers, which are right-aligned.
    """

    name: str
    cells: Sequence[Any]
    number: bool = True


def table(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Returns the columns of a table, without those whose cells are all empty.

    Args:
        rows: The cells of each row by heading. Floats are written with equally many decimals in all
            of a column; other cells are texts, or values for which the template has markup.
    """
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name, "") for row in rows]
        aligned = iter(drawing.align([cell for cell in cells if isinstance(cell, float)]))
        texts = [next(aligned) if isinstance(cell, float) else cell for cell in cells]
        if any(texts):
            columns.append(Column(name, texts, name not in _TEXTS))
    return columns


def evaluations(rows: Sequence[Row]) -> list[Column]:
    """Returns the figures of each evaluation, the newest last."""
    return table(
        [{"epoch": str(row.epoch + 1), "step": f"{row.step:,}", **row.figures} for row in rows]
    )


def stages(run: RunRecord) -> list[Column]:
    """Returns stages, layers, parameters and held forwards of each rank; empty if unknown."""
    stages = _stages(run.about.get("stages"))
    held = run.train[-1].lists.get("held_by_rank", []) if run.train else []
    peaks = run.pipeline.peaks if run.pipeline else ()
    count = max(len(held), len(peaks), *(_count(stage.get("rank")) + 1 for stage in stages), 0)
    total = sum(_count(stage.get("parameters")) for stage in stages)
    rows = []
    for rank in range(count):
        of_rank = [stage for stage in stages if stage.get("rank") == rank]
        parameters = sum(_count(stage.get("parameters")) for stage in of_rank)
        rows.append(
            {
                "rank": str(rank),
                "stages": ", ".join(str(stage.get("stage")) for stage in of_rank),
                "layers": "; ".join(_names(stage.get("layers")) for stage in of_rank),
                "parameters": f"{parameters:,}" if of_rank else "",
                "share": f"{parameters / total:.1%}" if total else "",
                "forwards held, planned": drawing.short(peaks[rank]) if rank < len(peaks) else "",
                "measured": drawing.short(held[rank]) if rank < len(held) else "",
            }
        )
    return table(rows)


def present(records: Sequence[RankRecord]) -> list[Column]:
    """Returns state, step, memory, messages and action of each rank of a job."""
    rows = []
    for one in records:
        age, cap = one.step_age, one.held_cap
        limit = f" of {drawing.size(one.memory_limit)}" if one.memory_limit else ""
        unsent = f", {drawing.size(one.outgoing)} to send" if one.outgoing else ""
        rows.append(
            {
                "rank": str(one.rank),
                "stage": "–" if one.stage is None else str(one.stage),
                "state": one.state,
                "busy": f"{one.busy:.0%}",
                "step": str(one.step),
                "last step": "–" if age is None else f"{drawing.seconds(age)} ago",
                "memory": drawing.size(one.memory) + limit,
                "held": f"{one.held}" if cap is None else f"{one.held} of {cap}",
                "messages": f"{one.incoming}{unsent}",
                "action": one.doing,
            }
        )
    return table(rows)


def attempts(records: Sequence[AttemptRecord]) -> list[Column]:
    """Returns when and after which step each attempt of the run began, and how it ended."""
    rows = []
    for number, one in enumerate(records, 1):
        lasted = None if one.ended is None else max(0.0, one.ended - one.began)
        rows.append(
            {
                "attempt": str(number),
                "began (UTC)": drawing.moment(one.began),
                "after step": f"{one.step:,}",
                "lasted": "" if lasted is None else drawing.seconds(lasted),
                "last step": "" if one.last_step is None else f"{one.last_step:,}",
                "end": one,
            }
        )
    return table(rows)


def events_table(events: Sequence[RunEvent]) -> list[Column]:
    """Returns the events of a run and their times, the newest last."""
    return table([{"time (UTC)": drawing.moment(one.time), "event": str(one)} for one in events])


def named_settings(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields names and values of settings; nested names are joined by dots."""
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value and above.count(".") < _MOST_LEVELS:
            yield from named_settings(value, f"{path}.")
        else:
            text = ", ".join(map(_text, value)) if isinstance(value, list) else _text(value)
            if text:
                yield path, text


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _names(layers: object) -> str:
    """Writes the layers of a stage, repeated ones once with a count."""
    names = [str(name).lstrip("_") for name in layers] if isinstance(layers, list) else []
    counted = [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]
    text = ", ".join(each.removeprefix("1 ") for each in counted)
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 2].rstrip(", ") + " .."


def _stages(value: object) -> list[dict[str, Any]]:
    """Returns the stages of ``run.json`` without those of impossible ranks."""
    listed = value if isinstance(value, list) else []
    stages = [stage for stage in listed if isinstance(stage, dict)]
    return [stage for stage in stages if 0 <= _count(stage.get("rank")) < len(stages)]


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


@cache
def _environment() -> Environment:
    """Returns the templates of this package; values in them are escaped."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = drawing.short
    environment.globals.update(live=False, version=__version__)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def render(name: str, now: float, **values: object) -> str:
    """Returns a page as an HTML text that loads no other file.

    Args:
        name: Its template.
        now: The date of the page, in seconds since 1970.
        values: What the template shows.
    """
    written = drawing.moment(now)
    return _environment().get_template(name).render(**values, written=written)


def page(run: RunRecord, now: float | None = None, live: bool = False) -> str:
    """Returns the page of a run as an HTML text that loads no other file.

    Args:
        run: The record of the run.
        now: The date of the page, in seconds since 1970; None: the present time.
        live: Whether the page updates itself.
    """
    at = time.time() if now is None else now
    command = run.about.get("command")
    board = run.board
    return render(
        "page.html",
        at,
        run=run,
        live=live,
        answers=[*answers_of(run, at), *_more_answers(run)],
        command=" ".join(map(str, command)) if isinstance(command, list) else "",
        learning=drawing.learning({run.name: run}),
        machine=drawing.machine({run.name: run}),
        ranks=present(board.ranks),
        schedule=_schedule(run),
        drawings=drawing.drawings(run.pipeline) if run.pipeline else [],
        stages=stages(run),
        attempts=attempts(board.attempts),
        events=events_table(events_of(board)),
        evaluations=evaluations(run.evaluations),
        settings={part: list(named_settings(run.section(part))) for part in _SECTIONS},
    )


def _more_answers(run: RunRecord) -> list[Answer]:
    """Returns the answers that need the files of a run: metrics, elapsed time, bubble and hash."""
    answers = []
    for name in drawing.metrics(run):
        named = {EVALUATED + name: " in the evaluation", name: ""}
        texts = [
            f"{drawing.short(run.series[n].values[-1])}{of}"
            for n, of in named.items()
            if n in run.series
        ]
        answers.append(Answer(name, ", ".join(texts)))
    elapsed = run.elapsed([*run.train[-1:], *run.evaluations[-1:]])
    if elapsed:
        answers.append(Answer("elapsed", drawing.seconds(max(elapsed))))
    if run.pipeline is not None:
        what = "measured" if run.pipeline.measured else "predicted"
        events = run.pipeline.measured or run.pipeline.predicted
        answers.append(
            Answer("bubble", f"{drawing.percent(figures_of(events).bubble_rate)}, {what}")
        )
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
    return render(
        "compare.html",
        at,
        names=list(runs),
        colours=drawing.MOST_COLOURS,
        learning=drawing.learning(runs),
        machine=drawing.machine(runs),
        figures=_last_figures(runs, at),
        settings=_differing(runs),
    )


def _last_figures(runs: Mapping[str, RunRecord], now: float) -> list[Column]:
    """Returns table columns with a row for each run: its state, and each metric's last value."""
    metrics = dict.fromkeys(name for run in runs.values() for name in drawing.metrics(run))
    rows = []
    for title, run in runs.items():
        texts = {one.question: one.text for one in [*answers_of(run, now), *_more_answers(run)]}
        row: dict[str, Any] = {"run": title}
        for question in ("state", "done", "elapsed", "hash"):
            row[question] = texts.get(question, "")
        for name in (drawing.LOSS, *metrics, *drawing.THROUGHPUT):
            heading = drawing.THROUGHPUT.get(name) or drawing.title_of(name)
            for prefix, phase in (("", "training"), (EVALUATED, "evaluation")):
                last = run.series[prefix + name].values[-1:] if prefix + name in run.series else ()
                row[f"{heading}, {phase}"] = float(last[0]) if last else ""
        rows.append(row)
    return table(rows)


def _differing(runs: Mapping[str, RunRecord]) -> list[Column]:
    """Returns table columns with a row for each setting in which the runs differ."""
    by_run: dict[str, dict[str, str]] = {}
    for title, run in runs.items():
        values: dict[str, Any] = {"schedule": run.section("schedule").get("name")}
        values.update({part: run.section(part) for part in _SECTIONS})
        by_run[title] = dict(named_settings(values))
    names = dict.fromkeys(name for settings in by_run.values() for name in settings)
    differing = [name for name in names if len({each.get(name) for each in by_run.values()}) > 1]
    columns = [Column("setting", differing, False)]
    for title, each in by_run.items():
        columns.append(Column(title, [each.get(name, "none") for name in differing], False))
    return columns if differing else []
