"""A board in the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fleetpipe.errors import ConfigError
from fleetpipe.extras import needed_for
from fleetpipe.report.numbers import seconds, short, size
from fleetpipe.watch.board import JobBoard, checkpoint_of, end_of
from fleetpipe.watch.source import Source

if TYPE_CHECKING:
    from rich.console import RenderableType

_PERIOD = 0.5
_STYLES = {"running": "green", "waiting": "yellow", "stopped": "bold red"}
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = (
    *("rank", "stage", "state", "busy", "step", "last step", "memory", "held", "waiting"),
    "action",
)


def show(source: Source) -> None:
    """Shows a job until Ctrl-C, or until it has ended.

    Raises:
        ConfigError: Nothing is to be seen from the beginning.
        PackageNotFound: rich is not installed.
    """
    with needed_for("watching a job in the terminal"):
        from rich.live import Live
    board, times = source(), deque[float](maxlen=60)
    with Live(rendered(board, times), refresh_per_second=4, screen=False) as live:
        while not _over(board):
            time.sleep(_PERIOD)
            try:
                board = source()
                times.append(board.step_time)
                live.update(rendered(board, times))
            except ConfigError as error:
                live.update(str(error))


def show_once(source: Source) -> None:
    """Prints what is to be seen now; raises as :func:`show`."""
    with needed_for("watching a job in the terminal"):
        from rich.console import Console
    Console().print(rendered(source(), ()))


def rendered(board: JobBoard, times: Sequence[float]) -> RenderableType:
    """Returns what the terminal shows of a board.

    Args:
        board: The board.
        times: The times of a step that were seen until now.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        words = name in ("state", "busy", "action")
        table.add_column(name, justify="left" if words else "right", overflow="ellipsis")
    for rank in board.ranks:
        limit = "" if rank.memory_limit is None else f" of {size(rank.memory_limit)}"
        table.add_row(
            str(rank.rank),
            "–" if rank.stage is None else str(rank.stage),
            Text(rank.state, _STYLES.get(rank.state, "dim")),
            f"{'█' * round(8 * rank.busy):8} {rank.busy:4.0%}",
            str(rank.step),
            "–" if rank.step_age is None else f"{seconds(rank.step_age)} ago",
            f"{size(rank.memory)}{limit}",
            str(rank.held) + ("" if rank.held_cap is None else f" of {rank.held_cap}"),
            str(rank.incoming),
            rank.action,
        )
    parts: list[RenderableType] = [Text("  ".join(_headline(board, times)))]
    if board.steps:
        parts.append(Padding(ProgressBar(board.steps, board.step), 0))
    parts += [Text(str(one), "bold red") for one in board.slow]
    if board.news:
        parts.append(Text(board.news, "yellow"))
    return Group(*parts, table)


def _headline(board: JobBoard, times: Sequence[float]) -> Iterator[str]:
    yield f"step {board.step}" + ("" if board.steps is None else f" of {board.steps}")
    most = max(times, default=0.0) or 1.0
    yield f"{seconds(board.step_time)}/step " + "".join(_BARS[int(7 * one / most)] for one in times)
    yield f"{short(board.samples_per_second)} samples/s"
    if board.eta_seconds is not None:
        yield f"remaining {end_of(board, time.time())}"
    if board.gradient_norm is not None:
        yield f"gradient norm {short(board.gradient_norm)}"
    yield f"checkpoint: {checkpoint_of(board)}"
    yield f"{board.restarts} restarts"


def _over(board: JobBoard) -> bool:
    return bool(board.ranks) and all(rank.state == "ended" for rank in board.ranks)
