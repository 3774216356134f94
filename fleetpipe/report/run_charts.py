"""The charts of one run, or of several in the same charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median

from fleetpipe.report.chart import Chart, chart
from fleetpipe.report.curves import Curve, with_mean
from fleetpipe.report.run import Row, RunFolder

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


def titled(name: str) -> str:
    """Returns what the page calls a figure."""
    return _TITLES.get(name, name)


def metrics(run: RunFolder) -> list[str]:
    """Returns the names of what the user measures, beside the loss."""
    rows = chain(run.train[-1:], run.evaluations[-1:], run.train[:1])
    names = dict.fromkeys(name for row in rows for name in row.figures)
    return [name for name in names if name not in (LOSS, RATE, NORM, *_MACHINE)]


def learning(runs: Mapping[str, RunFolder]) -> list[Chart]:
    """Returns the charts of loss, metrics, learning rate and gradient norm."""
    names = dict.fromkeys(name for run in runs.values() for name in metrics(run))
    return list(_charts(runs, [LOSS, *names, RATE, NORM]))


def machine(runs: Mapping[str, RunFolder]) -> list[Chart]:
    """Returns the charts of throughput and bubble; of one run also those of each rank."""
    charts = list(_charts(runs, [*THROUGHPUT, BUBBLE]))
    if len(runs) == 1:
        charts += chain.from_iterable(map(_of_ranks, runs.values()))
    return charts


def _began(run: RunFolder) -> float:
    """Returns when a run began, in seconds since 1970; 0 if that is not known."""
    moments = [*(each.began for each in run.attempts[:1]), *(row.time for row in run.train[:1])]
    return min(filter(_is_moment, moments), default=0.0)


def _is_moment(value: float) -> bool:
    return 0 < value < _LAST_MOMENT


def _charts(runs: Mapping[str, RunFolder], names: Sequence[str]) -> Iterator[Chart]:
    """Yields a chart for each figure that there is; of several runs each has its colour."""
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
            yield chart(titled(name), curves, unit, [] if several else _stops(run))


def _points(
    run: RunFolder, rows: Sequence[Row], name: str, factor: float
) -> tuple[list[int], list[float], list[float]]:
    """Returns the steps, the figures and the elapsed seconds of what rows have under a name."""
    chosen = [row for row in rows if name in row.figures]
    ys = [row.figures[name] * factor for row in chosen]
    return [row.step for row in chosen], ys, elapsed_seconds(run, chosen)


def elapsed_seconds(run: RunFolder, rows: Sequence[Row]) -> list[float]:
    """Returns how long the run had lasted at each row; nothing if that is not known."""
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
