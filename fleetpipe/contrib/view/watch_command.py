"""The command ``fleetpipe watch``: shows a job in the terminal, as JSON, or as a page."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qs, urlsplit

from fleetpipe.contrib.view import TOKEN, Address, configure_serve
from fleetpipe.contrib.view.answers import answers_of, status_of
from fleetpipe.contrib.view.board import FILE, BoardFile, JobBoard, RunRecord, parse_board
from fleetpipe.contrib.view.showing.drawing import format_figure, title_of
from fleetpipe.contrib.view.showing.page import rank_columns
from fleetpipe.contrib.view.showing.server import Server
from fleetpipe.errors import ConfigError, UsageError, printable
from fleetpipe.extras import needed_for

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

#: Seconds from one look to the next.
_PERIOD = 0.5
#: The style of rich for each kind of answer and each state of a rank.
_STYLES = {
    "good": "green",
    "open": "yellow",
    "bad": "bold red",
    "running": "green",
    "waiting": "yellow",
    "stopped": "bold red",
}
_BARS = "▁▂▃▄▅▆▇█"
#: The most blocks of a curve.
_BLOCKS = 50

#: Returns the board of a job as of now.
Source = Callable[[], JobBoard]
#: The most seconds that a served job may take to answer, and the most bytes of its board.
_PATIENCE, _LARGEST = 2.0, 1 << 24


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe watch`` to its parser."""
    parser.add_argument(
        "job",
        nargs="?",
        default="run",
        metavar="RUN | HOST:PORT",
        help="the folder of a run, or where a job is served (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON, for scripts")
    configure_serve(parser)


def run(options: argparse.Namespace) -> int:
    """Shows a job that runs.

    Returns:
        0.

    Raises:
        ConfigError: There is no such job, or it cannot be served.
        PackageNotFound: rich or prometheus-client is not installed.
        UsageError: ``--json`` is given without ``--once``.
    """
    if options.json and not options.once:
        raise UsageError("--json shows a job once", fix="give --once --json")
    source = source_of(options.job)
    if options.json:
        sys.stdout.write(json.dumps(status_of(source())) + "\n")
    elif options.serve is not None and not options.once:
        source()
        server = Server(options.serve, source)
        sys.stdout.write(f"{options.job} can be watched at {server.url}\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        finally:
            server.close()
    else:
        show(source, options.once)
    return 0


def show(source: Source, once: bool = False) -> None:
    """Shows a job in the terminal: once, or until Ctrl-C or the end of the job.

    Raises:
        ConfigError: The job cannot be read at the beginning.
        PackageNotFound: rich is not installed.
    """
    with needed_for("watching a job in the terminal"):
        from rich.console import Console
        from rich.live import Live
    board = source()
    if once:
        Console().print(render(board))
        return
    with Live(render(board), refresh_per_second=4, screen=False) as live:
        while board.state != "ended":
            time.sleep(_PERIOD)
            try:
                board = source()
                live.update(render(board))
            except ConfigError as error:
                live.update(_plain_text(str(error)))


def render(board: JobBoard) -> RenderableType:
    """Renders a job's state for the terminal: answers, what each rank does, and curves."""
    from rich.console import Group
    from rich.table import Table

    answers, curves, ranks = (
        Table(box=None, pad_edge=False, show_header=header) for header in (False, False, True)
    )
    for answer in answers_of(RunRecord("job", board)):
        style = _STYLES.get(answer.kind, "")
        # The mark shows what is wrong without colours too.
        mark = "!" if answer.kind == "bad" else ""
        answers.add_row(mark, answer.question, _plain_text(answer.text, style))
    for name, (_, values) in board.history.series().items():
        text = _plain_text(title_of(name))
        curves.add_row(
            text,
            _plain_text(format_figure(values[-1])),
            _plain_text(_draw_sparkline(values), "cyan"),
        )
    # The action stands in a line of its own.
    columns = [column for column in rank_columns(board.ranks) if column.name != "action"]
    for column in columns:
        # A narrow terminal shortens the other columns.
        whole = column.name in ("state", "busy", "step")
        justify: Literal["left", "right"] = "right" if column.number else "left"
        ranks.add_column(column.name, justify=justify, overflow="ellipsis", no_wrap=whole)
    for row in zip(*(column.cells for column in columns)):
        ranks.add_row(*(_plain_text(cell, _STYLES.get(cell, "")) for cell in row))
    acting = () if board.state == "ended" else board.ranks
    return Group(
        answers, ranks, curves, *(_plain_text(f"rank {rank.rank}: {rank.doing}") for rank in acting)
    )


def _plain_text(text: str, style: str = "") -> Text:
    """Returns a text for rich without markup and without control characters."""
    from rich.text import Text

    return Text(printable(text), style)


def _draw_sparkline(values: Sequence[float]) -> str:
    """Draws figures as a line of block characters, with blanks for NaN and infinite ones."""
    shown = values[:: -(-len(values) // _BLOCKS)]
    finite = [value for value in shown if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    return "".join(
        _BARS[int(7 * (value - low) / (span or 1.0))] if math.isfinite(value) else " "
        for value in shown
    )


def source_of(text: str) -> Source:
    """Returns a function that reads the state of a job, its board.

    Args:
        text: The folder of the job's run, HOST:PORT, or the address of the job's page.

    Raises:
        ConfigError: There is no such folder, no job writes its state there, or this is no
            HOST:PORT.
    """
    folder = Path(text)
    if folder.is_dir():
        if not (folder / FILE).is_file():
            raise ConfigError(
                "nobody keeps the board of a job in this folder",
                expected=f"{FILE}, which a job writes while it runs",
                got=str(folder),
                fix="train with callbacks=MetricsLogger(folder), or give the HOST:PORT of --serve",
            )
        return BoardFile(folder / FILE)
    if ":" not in text and not text.isdecimal():
        raise ConfigError(
            "there is no such folder, and this is no HOST:PORT",
            got=text,
            fix="give the folder of a run that has begun, or the HOST:PORT of --serve",
        )
    parts = urlsplit(text if "://" in text else f"//{text}")
    address = Address.parse(parts.netloc)
    token = parse_qs(parts.query).get("token", [os.environ.get(TOKEN, "")])[0]
    return lambda: _fetch_board(address, token)


def _fetch_board(address: Address, token: str) -> JobBoard:
    """Reads the state of a job over HTTP.

    Args:
        address: Where the job is served.
        token: The token to send; empty for none.

    Raises:
        ConfigError: Nothing answers there, or the answer is no state of a job.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        # The proxy that the environment names may not reach the job.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"http://{address}/board.json", headers=headers)
        with opener.open(request, timeout=_PATIENCE) as answer:
            return parse_board(answer.read(_LARGEST))
    except urllib.error.HTTPError as error:
        wrong = error.code in (401, 403)
        raise ConfigError(
            "the job is not shown to this user" if wrong else "this is no served job",
            got=f"{error.code} {error.reason} from {address}",
            fix=f"set {TOKEN}=TOKEN, as the job says where it begins"
            if wrong
            else "give the HOST:PORT of --serve",
        ) from error
    except (OSError, HTTPException) as error:
        raise ConfigError(
            f"no job is served at {address}",
            cause=str(getattr(error, "reason", error)).strip(),
            fix="start it with fleetpipe launch --serve PORT; on another host with HOST:PORT",
        ) from error
