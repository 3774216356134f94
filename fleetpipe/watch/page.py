"""The page of a job that runs, in the report's look: made anew for each look at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fleetpipe.report.chart import Chart, chart
from fleetpipe.report.curves import Curve
from fleetpipe.report.numbers import seconds, short
from fleetpipe.report.page import templates_of
from fleetpipe.version import __version__
from fleetpipe.watch.board import JobBoard, checkpoint_of, end_of

#: What a step took, and the mean share of it in which ranks computed.
StepFigures = tuple[float, float]


def page(board: JobBoard, history: Mapping[int, StepFigures]) -> str:
    """Returns the page as the text of an HTML file, whose script asks for it again.

    Args:
        board: The job as it is.
        history: Figures of steps that were seen, by step.
    """
    stopped = [str(rank.rank) for rank in board.ranks if rank.state == "stopped"]
    running = any(rank.state in ("running", "waiting") for rank in board.ranks)
    template = templates_of(__package__).get_template("watch.html")
    text: str = template.render(
        board=board,
        headline=f"step {board.step:,}" + (f" of {board.steps:,}" if board.steps else ""),
        news=f"stopped: rank {', '.join(stopped)}"
        if stopped
        else board.news or ("running" if running else "starting"),
        kind="bad" if stopped else "good" if running else "open",
        tiles=list(_tiles(board)),
        charts=list(_charts(history)),
        version=__version__,
    )
    return text


def _tiles(board: JobBoard) -> Iterator[tuple[str, str]]:
    yield "step time", seconds(board.step_time)
    yield "samples/s", short(board.samples_per_second)
    yield "remaining", end_of(board, board.at) or "not known"
    yield "last checkpoint", checkpoint_of(board)
    yield "restarts", str(board.restarts)
    if board.gradient_norm is not None:
        yield "gradient norm", short(board.gradient_norm)


def _charts(history: Mapping[int, StepFigures]) -> Iterator[Chart]:
    steps = sorted(history)
    for place, (title, unit, factor) in enumerate(
        (("step time", "s", 1.0), ("busy share, mean of ranks", "%", 100.0))
    ):
        ys = [factor * history[step][place] for step in steps]
        if steps:
            yield chart(title, [Curve(title, steps, ys, "line", place)], unit)
