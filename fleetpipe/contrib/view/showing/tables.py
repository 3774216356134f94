"""The cells of the page's tables: evaluations, ranks, attempts, and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fleetpipe.contrib.view.reading.attempts import AttemptRecord
from fleetpipe.contrib.view.reading.history import RunEvent
from fleetpipe.contrib.view.reading.run_record import Row, RunRecord
from fleetpipe.contrib.view.showing.numbers import align, moment, seconds, short, size
from fleetpipe.job.records import RankRecord

#: Letters of the names of a stage's layers.
_MOST_LETTERS = 60
#: Of settings in settings; what is deeper is written as it is.
_MOST_LEVELS = 8


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


def table(columns: Sequence[Column]) -> list[Column]:
    """Returns the columns that have a non-empty cell."""
    return [column for column in columns if any(column.cells)]


def evaluations(rows: Sequence[Row]) -> list[Column]:
    """Returns the figures of each evaluation, the newest last."""
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    texts = {
        name: iter(align([row.figures[name] for row in rows if name in row.figures]))
        for name in names
    }
    columns = [
        Column("epoch", [str(row.epoch + 1) for row in rows]),
        Column("step", [f"{row.step:,}" for row in rows]),
    ]
    for name in names:
        cells = [next(texts[name]) if name in row.figures else "" for row in rows]
        columns.append(Column(name, cells))
    return table(columns)


def stages(run: RunRecord) -> list[Column]:
    """Returns the stages of each rank of the pipeline, and what it holds; nothing if unknown."""
    stages = _stages(run.about.get("stages"))
    held = run.train[-1].lists.get("held_by_rank", []) if run.train else []
    peaks = run.pipeline.peaks if run.pipeline else ()
    count = max(len(held), len(peaks), *(_count(stage.get("rank")) + 1 for stage in stages), 0)
    by_rank = [[stage for stage in stages if stage.get("rank") == rank] for rank in range(count)]
    sums = [sum(_count(stage.get("parameters")) for stage in each) for each in by_rank]
    total = sum(sums)
    return table(
        [
            Column("rank", [str(rank) for rank in range(count)]),
            Column(
                "stages", [", ".join(str(s.get("stage")) for s in each) for each in by_rank], False
            ),
            Column(
                "layers",
                ["; ".join(_names(s.get("layers")) for s in each) for each in by_rank],
                False,
            ),
            Column("parameters", [f"{n:,}" if each else "" for n, each in zip(sums, by_rank)]),
            Column("share", [f"{n / total:.1%}" for n in sums] if total else []),
            Column("forwards held, planned", _fill(peaks, count)),
            Column("measured", _fill(held, count)),
        ]
    )


def present(records: Sequence[RankRecord]) -> list[Column]:
    """Returns what each rank of a job does and has at this moment."""
    limits = [f" of {size(one.memory_limit)}" if one.memory_limit else "" for one in records]
    caps = ["" if one.held_cap is None else f" of {one.held_cap}" for one in records]
    ages = [one.step_age for one in records]
    unsent = [f", {size(one.outgoing)} to send" if one.outgoing else "" for one in records]
    columns = [
        Column("rank", [str(one.rank) for one in records]),
        Column("stage", ["–" if one.stage is None else str(one.stage) for one in records]),
        Column("state", [one.state for one in records], False),
        Column("busy", [f"{one.busy:.0%}" for one in records]),
        Column("step", [str(one.step) for one in records]),
        Column("last step", ["–" if age is None else f"{seconds(age)} ago" for age in ages]),
        Column("memory", [size(one.memory) + of for one, of in zip(records, limits)]),
        Column("held", [f"{one.held}{of}" for one, of in zip(records, caps)]),
        Column("messages", [f"{one.incoming}{of}" for one, of in zip(records, unsent)]),
        Column("action", [one.doing for one in records], False),
    ]
    return columns if records else []


def attempts(records: Sequence[AttemptRecord]) -> list[Column]:
    """Returns when and where each attempt of the run began, and how it ended."""
    lasted = [None if each.ended is None else each.ended - each.began for each in records]
    steps = [each.last_step for each in records]
    return table(
        [
            Column("attempt", [str(number) for number, _ in enumerate(records, 1)]),
            Column("began (UTC)", [moment(each.began) for each in records], False),
            Column("after step", [f"{each.step:,}" for each in records]),
            Column("lasted", ["" if n is None else seconds(max(0.0, n)) for n in lasted]),
            Column("last step", ["" if step is None else f"{step:,}" for step in steps]),
            Column("end", records, False),
        ]
    )


def events(happened: Sequence[RunEvent]) -> list[Column]:
    """Returns what happened to a run, the newest last."""
    return table(
        [
            Column("time (UTC)", [moment(event.time) for event in happened], False),
            Column("event", [str(event) for event in happened], False),
        ]
    )


def settings(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields names and values of settings; nested names are joined by dots."""
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value and above.count(".") < _MOST_LEVELS:
            yield from settings(value, f"{path}.")
        else:
            text = ", ".join(map(_text, value)) if isinstance(value, list) else _text(value)
            if text:
                yield path, text


def _fill(figures: Sequence[float], count: int) -> list[str]:
    return [short(figures[rank]) if rank < len(figures) else "" for rank in range(count)]


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
    """Returns the stages of ``run.json``; each rank has at least one."""
    stages = (
        [stage for stage in value if isinstance(stage, dict)] if isinstance(value, list) else []
    )
    return [stage for stage in stages if 0 <= _count(stage.get("rank")) < len(stages)]


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
