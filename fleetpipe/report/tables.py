"""The tables of the page: evaluations, ranks, lives, and what was configured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleetpipe.report.lives import Life
from fleetpipe.report.markup import Child, Element, element
from fleetpipe.report.numbers import aligned, moment, seconds, short, size
from fleetpipe.report.run import Row, Run

#: A column: its heading, and whether it holds numbers.
Column = tuple[str, bool]
#: Letters of the names of a stage's layers.
_MOST_LETTERS = 60
#: Of settings in settings; what is deeper is written as it is.
_MOST_LEVELS = 8


def table(columns: Sequence[Column], rows: Iterable[Sequence[Child]]) -> Element:
    """Returns a table whose numbers stand below each other; columns without a cell are left out."""
    filled = [list(row) for row in rows]
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", None) for row in filled)]

    def cells(tag: str, values: Sequence[Child]) -> Iterator[Element]:
        for i in kept:
            yield element(tag, values[i], class_="number" if columns[i][1] else None)

    head = element("tr", *cells("th", [name for name, _ in columns]))
    body = (element("tr", *cells("td", row)) for row in filled)
    made = element("table", element("thead", head), element("tbody", *body))
    return element("div", made, class_="wide", tabindex="0")


def evaluations(rows: Sequence[Row]) -> Element:
    """Returns the figures of each evaluation, the newest last."""
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    columns = [("epoch", True), ("step", True), *((name, True) for name in names)]
    texts = {
        name: iter(aligned([row.figures[name] for row in rows if name in row.figures]))
        for name in names
    }
    return table(
        columns,
        (
            [
                str(row.epoch + 1),
                f"{row.step:,}",
                *(next(texts[name]) if name in row.figures else "" for name in names),
            ]
            for row in rows
        ),
    )


def ranks(run: Run) -> Element | None:
    """Returns what each rank of the pipeline has, holds and uses; None where nothing is known."""
    stages = _stages(run.about.get("stages"))
    last = run.train[-1].lists if run.train else {}
    held = last.get("held_by_rank", [])
    peaks = run.pipeline.peaks if run.pipeline else ()
    count = max(len(held), len(peaks), *(_whole(stage.get("rank")) + 1 for stage in stages), 0)
    if not count:
        return None
    total = sum(_whole(stage.get("parameters")) for stage in stages)

    def row(rank: int) -> list[Child]:
        own = [stage for stage in stages if stage.get("rank") == rank]
        parameters = sum(_whole(stage.get("parameters")) for stage in own)
        return [
            str(rank),
            ", ".join(str(stage.get("stage")) for stage in own),
            "; ".join(_names(stage.get("layers")) for stage in own),
            f"{parameters:,}" if own else "",
            f"{parameters / total:.1%}" if total else "",
            short(peaks[rank]) if rank < len(peaks) else "",
            short(held[rank]) if rank < len(held) else "",
        ]

    columns = [
        *(("rank", True), ("stages", False), ("layers", False), ("parameters", True)),
        *(("share", True), ("forwards held, planned", True), ("measured", True)),
    ]
    return table(columns, map(row, range(count)))


def memory(run: Run) -> Element | None:
    """Returns the peak memory of each process, with bars; None where it was not measured."""
    found = run.train[-1].lists.get("peak_memory_by_process") if run.train else None
    if not found:
        return None
    most = max(found) or 1.0
    return table(
        [("process", True), ("peak memory", True), ("", False)],
        (
            [
                str(process),
                size(value),
                element("i", class_="bar", style=f"width:{max(0, value) / most:.1%}"),
            ]
            for process, value in enumerate(found)
        ),
    )


def lives(found: Sequence[Life]) -> Element:
    """Returns when the run began each time, where, and how it ended."""

    def row(number: int, life: Life) -> list[Child]:
        how = element("span", life.outcome or "not told", class_="bad" if life.failed else None)
        if life.details:
            words = element("pre", life.details)
            how = element("details", element("summary", how), words)
        lasted = "" if life.ended is None else seconds(max(0.0, life.ended - life.began))
        last = "" if life.last_step is None else f"{life.last_step:,}"
        return [str(number), moment(life.began), f"{life.step:,}", lasted, last, how]

    columns = [
        *(("attempt", True), ("began (UTC)", False), ("after step", True), ("lasted", True)),
        *(("last step", True), ("end", False)),
    ]
    return table(columns, (row(number, life) for number, life in enumerate(found, 1)))


def settings(values: Mapping[str, Any]) -> Element:
    """Returns names and values; those of nested ones with dots between the names."""
    rows = [
        (element("dt", name), element("dd", text)) for name, text in _flat(values) if text != ""
    ]
    return element("dl", *(part for row in rows for part in row))


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, dict) and value and above.count(".") < _MOST_LEVELS:
            yield from _flat(value, f"{path}.")
        elif isinstance(value, list):
            yield path, ", ".join(map(_text, value))
        else:
            yield path, _text(value)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _names(layers: object) -> str:
    """Writes the layers of a stage, several alike once."""
    names = [str(name).lstrip("_") for name in layers] if isinstance(layers, list) else []
    counted = [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]
    text = ", ".join(each.removeprefix("1 ") for each in counted)
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 2].rstrip(", ") + " .."


def _stages(found: object) -> list[dict[str, Any]]:
    """Returns the stages of ``run.json``: each rank has one at least."""
    listed = found if isinstance(found, list) else []
    stages = [stage for stage in listed if isinstance(stage, dict)]
    return [stage for stage in stages if 0 <= _whole(stage.get("rank")) < len(stages)]


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
