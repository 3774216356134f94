"""Makes a board of the whole job on its first rank, five times a second.

A thread of rank 0 combines the records of all ranks. It writes the board as a file into the folder
of the attempt, which the launcher reads, and into the folders of the run, and logs slow ranks.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from fleetpipe import atomic_file, log
from fleetpipe.contrib.view.address import Address
from fleetpipe.contrib.view.judging.slow_ranks import Notices, SlowRank
from fleetpipe.contrib.view.reading import history
from fleetpipe.contrib.view.reading.board import (
    FILE,
    PERIOD,
    Boards,
    JobBoard,
    checkpoint_of,
    read_board,
)
from fleetpipe.errors import ConfigError
from fleetpipe.job import attempt_files, run_files
from fleetpipe.job.job import Job, current_job

_log = log.logger(__name__)
#: The least seconds from one file of the history to the next, and how many times its writing.
_HISTORY_PERIOD, _HISTORY_TIMES = 1.0, 500
#: Seconds that a board may take at the end of a job.
_LONGEST = 10.0
#: Most steps between two boards.
_MOST_NOTED = 4096


class Reporter:
    """Makes the board of a job until the job ends.

    Attributes:
        board: The last board.
    """

    def __init__(self, job: Job) -> None:
        self.board = JobBoard(time.time())
        self._job = job
        self._boards = Boards()
        self._notices = Notices()
        self._history = history.History()
        self._figures = job.progress.figures = deque(maxlen=_MOST_NOTED)
        self._history_due = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleetpipe-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the last board says that the job has ended."""
        self._ended.set()
        self._thread.join(_LONGEST)
        if self._thread.is_alive():  # on a disk that hangs: it would write over the last one
            return
        # The last step may be younger than what was heard last; it is that of all ranks.
        last = self._job.progress.record(0, "", with_rows=False)
        step = max(self.board.step, last.step)
        ranks = [replace(rank, state="ended", step=step, part="") for rank in self.board.ranks]
        if ranks:
            ranks[0] = replace(ranks[0], spent=last.spent, step_age=last.step_age)
        self.board = replace(
            self.board,
            at=time.time(),
            step=step,
            ranks=tuple(ranks),
            gradient_norm=last.gradient_norm,
            last_checkpoint=max(
                filter(None, [self.board.last_checkpoint, checkpoint_of(last)]), default=None
            ),
            news="the job has ended",
        )
        self._note(self.board)
        self._history_due = 0.0
        self._write(self.board)

    def _run(self) -> None:
        try:
            while not self._ended.wait(PERIOD):
                board = self._boards.next(self._job.heard(), time.time())
                self._note(board)
                restarts = max(0, attempt_files.number() - 1)
                self.board = replace(board, restarts=restarts, history=self._history)
                self._write(self.board)
                self._name_slow(self.board.slow)
        except Exception:  # the training goes on without
            _log.exception("the board of the job broke; nobody can watch it any more")

    def _note(self, board: JobBoard) -> None:
        """Adds the figures that came since the last board to those of the run."""
        if not self._figures:
            return
        if not self._history.last:
            # What an earlier attempt has left; from the step on that comes now it is dropped.
            earlier = map(history.read_history, self._folders())
            self._history = max(earlier, key=lambda one: one.last, default=self._history)
        for _ in range(len(self._figures)):
            self._history.add(*self._figures.popleft())
        if board.step_time:
            busy = sum(rank.busy for rank in board.ranks) / len(board.ranks)
            norm = {} if board.gradient_norm is None else {"gradient norm": board.gradient_norm}
            self._history.add(self._history.last, {**norm, "busy share": 100 * busy})

    def _write(self, board: JobBoard) -> None:
        self._replace(FILE, board.content())
        now = time.monotonic()
        if self._history.last and now >= self._history_due:
            begin = time.thread_time()
            self._replace(history.FILE, self._history.content())
            took = time.thread_time() - begin
            self._history_due = now + max(_HISTORY_PERIOD, _HISTORY_TIMES * took)

    def _replace(self, name: str, content: object) -> None:
        text = json.dumps(content)
        for folder in self._folders():
            with contextlib.suppress(OSError):
                atomic_file.replace_text(folder / name, text)

    def _folders(self) -> Iterator[Path]:
        yield from self._job.progress.folders
        home = attempt_files.folder()
        if home is not None:
            yield home

    def _name_slow(self, slow: tuple[SlowRank, ...]) -> None:
        """Logs each rank that stays slow."""
        for one in self._notices.choose(slow, time.monotonic()):
            _log.warning("step %d: %s", self.board.step, one)
            line = {"step": self.board.step, "time": time.time(), **asdict(one)}
            for folder in self._job.progress.folders:
                with contextlib.suppress(OSError):
                    run_files.append_line(folder / run_files.SLOW, line)


def record_in(folder: Path) -> None:
    """Makes the first rank write the board of the current job into the folder of a run too."""
    job = current_job()
    if job is not None and job.leads():
        _warn_of_another(folder)
        job.progress.folders.append(folder)
        if not job.keeps_board:
            _keep(job)


def _warn_of_another(folder: Path) -> None:
    """Warns if another job is writing its board into this folder."""
    with contextlib.suppress(ConfigError):
        board = read_board(folder / FILE)
        over = all(rank.state == "ended" for rank in board.ranks)
        if not over and board.seen_at(time.time()) is board:
            _log.warning("another job runs in %s: give each a folder of its own", folder)


def _keep(job: Job) -> Reporter:
    reporter = Reporter(job)
    job.keeps_board = True
    job.endings.append(reporter.close)
    return reporter


def begin(job: Job, address: str | None) -> None:
    """Keeps the board of a job on its first rank until the job ends, and serves it.

    The address is PORT or HOST:PORT, or None for nowhere. Raises the errors of ``Server``.
    """
    reporter = _keep(job)
    if address is not None:
        from fleetpipe.contrib.view.showing.server import Server

        server = Server(Address.parse(address), lambda: reporter.board.seen_at(time.time()))
        job.endings.append(server.close)
        _log.info("the job can be watched at %s", server.url)
