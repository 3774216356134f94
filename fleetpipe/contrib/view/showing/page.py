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
from fleetpipe.contrib.view.board import RunRecord
from fleetpipe.contrib.view.history import EVALUATED, AttemptRecord
from fleetpipe.contrib.view.showing import drawing
from fleetpipe.contrib.view.showing.drawing import (
    format_bytes,
    format_column,
    format_duration,
    format_figure,
    format_moment,
    format_percent,
)
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
_TEXT_COLUMNS = (
    *("run", "state", "done", "elapsed", "hash", "stages", "layers", "action"),
    *("began (UTC)", "end", "time (UTC)", "event"),
)


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: The heading of the column.
        cells: The texts, or values for which the template has markup; an empty one is left blank.
        number: Whether the cells are numbers, which are right-aligned.
    """

    name: str
    cells: Sequence[Any]
    number: bool = True


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Returns the columns of a table, without those whose cells are all empty.

    Args:
        rows: The cells of each row by heading. Floats are written with equally many decimals in all
            of a column; other cells are texts, or values for which the template has markup.
    """
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name, "") for row in rows]
        aligned = iter(format_column([cell for cell in cells if isinstance(cell, float)]))
        texts = [next(aligned) if isinstance(cell, float) else cell for cell in cells]
        if any(texts):
            columns.append(Column(name, texts, name not in _TEXT_COLUMNS))
    return columns


def stage_columns(run: RunRecord) -> list[Column]:
    """Returns the table of the stages, layers, parameters and held forwards of each rank."""
    stages = _valid_stages(run.about.get("stages"))
    held = run.train[-1].lists.get("held_by_rank", []) if run.train else []
    peaks = run.pipeline.peaks if run.pipeline else ()
    count = max(len(held), len(peaks), *(stage["rank"] + 1 for stage in stages), 0)
    total = sum(stage["parameters"] for stage in stages)
    rows = []
    for rank in range(count):
        of_rank = [stage for stage in stages if stage["rank"] == rank]
        parameters = sum(stage["parameters"] for stage in of_rank)
        rows.append(
            {
                "rank": str(rank),
                "stages": ", ".join(str(stage.get("stage")) for stage in of_rank),
                "layers": "; ".join(_format_layers(stage.get("layers")) for stage in of_rank),
                "parameters": f"{parameters:,}" if of_rank else "",
                "share": f"{parameters / total:.1%}" if total else "",
                "forwards held, planned": format_figure(peaks[rank]) if rank < len(peaks) else "",
                "measured": format_figure(held[rank]) if rank < len(held) else "",
            }
        )
    return columns_of(rows)


def rank_columns(records: Sequence[RankRecord]) -> list[Column]:
    """Returns the table of the state, step, memory, messages and action of each rank of a job."""
    rows = []
    for record in records:
        age, cap = record.step_age, record.held_cap
        limit = f" of {format_bytes(record.memory_limit)}" if record.memory_limit else ""
        unsent = f", {format_bytes(record.outgoing)} to send" if record.outgoing else ""
        rows.append(
            {
                "rank": str(record.rank),
                "stage": "–" if record.stage is None else str(record.stage),
                "state": record.state,
                "busy": f"{record.busy:.0%}",
                "step": str(record.step),
                "last step": "–" if age is None else f"{format_duration(age)} ago",
                "memory": format_bytes(record.memory) + limit,
                "held": f"{record.held}" if cap is None else f"{record.held} of {cap}",
                "messages": f"{record.incoming}{unsent}",
                "action": record.doing,
            }
        )
    return columns_of(rows)


def attempt_columns(records: Sequence[AttemptRecord]) -> list[Column]:
    """Returns the table of the attempts: when and after which step each began, and how it ended."""
    rows = []
    for number, attempt in enumerate(records, 1):
        lasted = None if attempt.ended is None else max(0.0, attempt.ended - attempt.began)
        rows.append(
            {
                "attempt": str(number),
                "began (UTC)": format_moment(attempt.began),
                "after step": f"{attempt.step:,}",
                "lasted": "" if lasted is None else format_duration(lasted),
                "last step": "" if attempt.last_step is None else f"{attempt.last_step:,}",
                "end": attempt,
            }
        )
    return columns_of(rows)


def named_settings(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields names and values of settings; nested names are joined by dots."""
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value and above.count(".") < _MOST_LEVELS:
            yield from named_settings(value, f"{path}.")
        else:
            listed = value if isinstance(value, list) else [value]
            text = ", ".join(map(_format_setting, listed))
            if text:
                yield path, text


def _format_setting(value: object) -> str:
    """Formats the value of a setting; None as an empty text."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _format_layers(layers: object) -> str:
    """Lists the types of the layers of a stage, each once, with its count."""
    names = [str(name).lstrip("_") for name in layers] if isinstance(layers, list) else []
    counted = [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]
    text = ", ".join(name.removeprefix("1 ") for name in counted)
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 2].rstrip(", ") + " .."


def _valid_stages(value: object) -> list[dict[str, Any]]:
    """Returns the stages in ``run.json``, without those whose rank is impossible.

    The rank and the number of parameters of each are whole numbers; what is none counts as 0.
    """
    stages = []
    for stage in value if isinstance(value, list) else []:
        if isinstance(stage, dict):
            numbers = {name: stage.get(name) for name in ("rank", "parameters")}
            whole = {name: n if isinstance(n, int) else 0 for name, n in numbers.items()}
            stages.append({**stage, **whole})
    return [stage for stage in stages if 0 <= stage["rank"] < len(stages)]


@cache
def _template_environment() -> Environment:
    """Returns the environment of Jinja for this package's templates, which escape values."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["format_figure"] = format_figure
    environment.globals.update(live=False, version=__version__)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def render(name: str, now: float, **values: object) -> str:
    """Returns a page as an HTML text that loads no other file.

    Args:
        name: The name of the page's template.
        now: The date of the page, in seconds since 1970.
        values: What the template shows.
    """
    written = format_moment(now)
    return _template_environment().get_template(name).render(**values, written=written)


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
    events = [
        {"time (UTC)": format_moment(event.time), "event": str(event)} for event in events_of(board)
    ]
    evaluations = [
        {"epoch": str(row.epoch + 1), "step": f"{row.step:,}", **row.figures}
        for row in run.evaluations
    ]
    return render(
        "page.html",
        at,
        run=run,
        live=live,
        answers=[*answers_of(run, at), *_answers_from_files(run)],
        command=" ".join(map(str, command)) if isinstance(command, list) else "",
        learning=drawing.learning_charts({run.name: run}),
        machine=drawing.machine_charts({run.name: run}),
        ranks=rank_columns(board.ranks),
        schedule=_describe_schedule(run),
        drawings=drawing.timeline_drawings(run.pipeline) if run.pipeline else [],
        stages=stage_columns(run),
        attempts=attempt_columns(board.attempts),
        events=columns_of(events),
        evaluations=columns_of(evaluations),
        settings={part: list(named_settings(run.section(part))) for part in _SECTIONS},
    )


def _answers_from_files(run: RunRecord) -> list[Answer]:
    """Returns the answers that need the files of a run: metrics, elapsed time, bubble and hash."""
    answers = []
    for name in drawing.metric_names(run):
        phases = {EVALUATED + name: " in the evaluation", name: ""}
        last = {n: run.series[n].values[-1] for n in phases if n in run.series}
        texts = (f"{format_figure(value)}{phases[n]}" for n, value in last.items())
        answers.append(Answer(name, ", ".join(texts)))
    elapsed = run.elapsed([*run.train[-1:], *run.evaluations[-1:]])
    if elapsed:
        answers.append(Answer("elapsed", format_duration(max(elapsed))))
    if run.pipeline is not None:
        track = "measured" if run.pipeline.measured else "predicted"
        events = run.pipeline.measured or run.pipeline.predicted
        rate = format_percent(figures_of(events).bubble_rate)
        answers.append(Answer("bubble", f"{rate}, {track}"))
    if run.saved is not None:
        answers.append(Answer("hash", f"{run.saved[1]}, of step {run.saved[0]:,}"))
    return answers


def _describe_schedule(run: RunRecord) -> str:
    """Returns a line with the schedule, the ranks, the chunks and the micro-batches of a run."""
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
        names = ["/".join(path[-length:]) for path in parts]
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
        learning=drawing.learning_charts(runs),
        machine=drawing.machine_charts(runs),
        figures=_last_figure_columns(runs, at),
        settings=_differing_setting_columns(runs),
    )


def _last_figure_columns(runs: Mapping[str, RunRecord], now: float) -> list[Column]:
    """Returns a table with a row for each run: its state, and the last value of each metric."""
    metrics = dict.fromkeys(name for run in runs.values() for name in drawing.metric_names(run))
    rows = []
    for title, run in runs.items():
        answers = [*answers_of(run, now), *_answers_from_files(run)]
        texts = {answer.question: answer.text for answer in answers}
        questions = ("state", "done", "elapsed", "hash")
        row: dict[str, Any] = {"run": title, **{name: texts.get(name, "") for name in questions}}
        for name in (drawing.LOSS, *metrics, *drawing.THROUGHPUT):
            heading = drawing.THROUGHPUT.get(name) or drawing.title_of(name)
            for prefix, phase in (("", "training"), (EVALUATED, "evaluation")):
                last = run.series[prefix + name].values[-1:] if prefix + name in run.series else ()
                row[f"{heading}, {phase}"] = float(last[0]) if last else ""
        rows.append(row)
    return columns_of(rows)


def _differing_setting_columns(runs: Mapping[str, RunRecord]) -> list[Column]:
    """Returns a table with a row for each setting in which the runs differ; empty if none does."""
    by_run: dict[str, dict[str, str]] = {}
    for title, run in runs.items():
        sections = {part: run.section(part) for part in _SECTIONS}
        schedule = run.section("schedule").get("name")
        by_run[title] = dict(named_settings({"schedule": schedule, **sections}))
    names = dict.fromkeys(name for settings in by_run.values() for name in settings)
    differing = [name for name in names if len({run.get(name) for run in by_run.values()}) > 1]
    columns = [Column("setting", differing, False)]
    for title, settings in by_run.items():
        columns.append(Column(title, [settings.get(name, "none") for name in differing], False))
    return columns if differing else []
