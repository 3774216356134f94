"""``--serve`` of the launcher: serves the board of a job through all of its attempts."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fleetpipe import atomic_file
from fleetpipe.contrib.view import Address, history
from fleetpipe.contrib.view.board import FILE, JobBoard, read_board
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import RankRecord


class AttemptBoard:
    """Reads the state of a job, from the folder of the attempt that runs now."""

    def __init__(self) -> None:
        self._last = JobBoard(time.time())
        self._file: Path | None = None
        self._restarts = 0
        self._news = ""

    def begin(self, directory: Path, restarts: int = 0, news: str = "") -> None:
        """Switches to an attempt that begins.

        Args:
            directory: The folder of the attempt, into which its first rank writes the board.
            restarts: How many earlier attempts failed.
            news: Why the attempt was started; empty for the first one.
        """
        starting = tuple(
            RankRecord(rank.rank, "nothing heard yet", rank.stages) for rank in self._last.ranks
        )
        self._last = replace(
            self._last,
            ranks=starting,
            slow=(),
            step_time=0.0,
            usual_step=0.0,
            samples_per_second=0.0,
        )
        if self._file is not None:
            earlier = history.read_history(self._file.parent)
            step, text = max(self._last.step, earlier.last), news or "the training begins again"
            earlier.add_event(history.RunEvent(time.time(), step, "restart", text, step))
            atomic_file.replace_text(directory / history.FILE, json.dumps(earlier.content()))
            self._last = replace(self._last, history=earlier)
        self._file, self._restarts, self._news = directory / FILE, restarts, news

    def __call__(self) -> JobBoard:
        """Returns the current state of the job."""
        if self._file is not None and self._file.exists():
            with contextlib.suppress(ConfigError):  # its folder is just being removed
                self._last = read_board(self._file)
        else:
            self._last = replace(self._last, at=time.time())
        news = self._last.news or self._news
        board = replace(self._last, restarts=self._restarts, news=news)
        return board.seen_at(time.time())


@contextmanager
def serving(address: Address | None) -> Iterator[AttemptBoard]:
    """Serves the board of a job while the context is open.

    Args:
        address: The address to serve at; None: nothing is served.

    Yields:
        The board, whose :meth:`AttemptBoard.begin` the launcher calls for each attempt. Raises the
        errors of ``Server``.
    """
    board = AttemptBoard()
    if address is None:
        yield board
        return
    from fleetpipe.contrib.view.showing.server import Server

    server = Server(address, board)
    sys.stderr.write(f"fleetpipe: the job can be watched at {server.url}\n")
    try:
        yield board
    finally:
        server.close()
