"""Makes a board of the whole job on its first rank, five times a second.

A thread of rank 0 combines the records of all ranks. It writes the board as a file into the folder
of the attempt, which the launcher reads, and into the folders of the run, beside a history of
figures and events; and it logs slow ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fleetpipe import atomic_file, log
from fleetpipe.contrib.view import Address, history
from fleetpipe.contrib.view.board import FILE, PERIOD, Boards, JobBoard, checkpoint_of, read_board
from fleetpipe.contrib.view.slow_ranks import Notices, SlowRank
from fleetpipe.errors import ConfigError
from fleetpipe.job import allow, attempt_files, run_files
from fleetpipe.job.job import Job, current_job
from fleetpipe.job.records import LastRecord, RankRecord

_log = log.logger(__name__)
#: A history is written again after so many seconds, and so many times as long as writing it took.
_HISTORY_PERIOD, _HISTORY_TIMES = 1.0, 500
#: Seconds that the thread may still run at the end of a job.
_LONGEST = 10.0
#: The most steps, and the most events, that are kept from one board to the next.
_MOST_NOTED = 4096
#: Loggers whose warnings are no events, since others tell of the same.
_NO_EVENTS = (__name__, allow.__name__)


class BoardWriter:
    """Makes the state of a job, its board, from the records of its ranks; writes it into files.

    Attributes:
        board: The last state of the job.
    """

    def __init__(self, job: Job, now: float) -> None:
        """Begins without any record of a rank.

        Args:
            job: The job.
            now: Seconds since 1970.
        """
        self.board = JobBoard(now)
        self._job = job
        self._boards = Boards()
        self._notices = Notices()
        self._history = history.History()
        self._figures = job.progress.figures = deque(maxlen=_MOST_NOTED)
        self._noted = job.progress.events = deque(maxlen=_MOST_NOTED)
        if attempt_files.number() <= 1:  # the launcher adds the event of a later attempt
            self._add_event("start", "the training begins", job.progress.step, now)
        #: What was let pass, and has an event.
        self._allowed: set[str] = set()
        #: The figures whose first NaN or infinity has an event.
        self._not_finite: set[str] = set()
        #: Whether another job has been seen to write into a folder.
        self._mixed = False
        #: In the time of the boards, which may be set back.
        self._history_written, self._history_period = -math.inf, _HISTORY_PERIOD
        #: By folder the identity of the board's file that was written last.
        self._written: dict[Path, tuple[int, int]] = {}

    def add(self, heard: Mapping[int, LastRecord], now: float) -> None:
        """Combines the records of the ranks into the state of the job, and writes it.

        Args:
            heard: The last record of each rank, with the rows that came since the last board.
            now: Seconds since 1970.
        """
        board = self._boards.next_board(heard, now)
        restarts = max(0, attempt_files.number() - 1)
        for slow in self._publish(replace(board, restarts=restarts), board.slow):
            _log.warning("step %d: %s", board.step, slow)
            line = {"step": board.step, "time": now, **asdict(slow)}
            for folder in self._job.progress.folders:
                with contextlib.suppress(OSError):
                    run_files.append_line(folder / run_files.SLOW, line)

    def close(self, last: RankRecord, now: float) -> None:
        """Writes the last state of the job, which says that the job has ended.

        Args:
            last: The last record of this rank, which may be newer than the last board's.
            now: Seconds since 1970.
        """
        step = max(self.board.step, last.step)
        ranks = [replace(rank, state="ended", step=step, part="") for rank in self.board.ranks]
        if ranks:
            ranks[0] = replace(ranks[0], spent=last.spent, step_age=last.step_age)
        saved = filter(None, [self.board.last_checkpoint, checkpoint_of(last)])
        board = replace(
            self.board,
            at=now,
            step=step,
            ranks=tuple(ranks),
            gradient_norm=last.gradient_norm,
            last_checkpoint=max(saved, default=None),
            news="the job has ended",
        )
        self._history_written = -math.inf
        self._publish(board, slow=())

    def _publish(self, board: JobBoard, slow: Sequence[SlowRank]) -> list[SlowRank]:
        """Writes the state of the job, with what happened since the last call in its history.

        Args:
            board: The state.
            slow: The ranks that are slow now.

        Returns:
            The slow ranks that the log has to name.
        """
        self._note_figures(board)
        named = self._notices.choose(slow, board.at)
        self._note_events(board)
        self.board = replace(board, history=self._history)
        self._write(self.board)
        return named

    def _note_figures(self, board: JobBoard) -> None:
        """Adds to the history the figures of the steps since the last call."""
        if not self._figures:
            return
        if not self._history.last:
            self._continue_history(self._figures[0][0])
        for _ in range(len(self._figures)):
            step, figures = self._figures.popleft()
            self._history.add(step, figures)
            for name, figure in figures.items():
                if not math.isfinite(figure) and name not in self._not_finite:
                    self._not_finite.add(name)
                    self._add_event("nan", f"{name} is {figure}", step, board.at)
        if board.step_time:
            busy = sum(rank.busy for rank in board.ranks) / len(board.ranks)
            norm = {} if board.gradient_norm is None else {"gradient_norm": board.gradient_norm}
            self._history.add(self._history.last, {**norm, "busy share": 100 * busy})

    def _continue_history(self, step: int) -> None:
        """Continues the longest history in the folders, if the first step shows a resumed run."""
        if step > 1 or attempt_files.number() > 1:
            earlier = map(history.read_history, self._board_folders())
            events = self._history.events
            self._history = max(
                (self._history, *earlier), key=lambda kept: (kept.last, len(kept.events))
            )
            for event in events:
                self._history.add_event(event)

    def _note_events(self, board: JobBoard) -> None:
        """Adds to the history what happened since the last call."""
        # A process that replaces a rank has not done a step of its own yet.
        step = max(board.step, self._history.last)
        for _ in range(len(self._noted)):
            self._add_event(*self._noted.popleft(), step, board.at)
        used = self._job.allow.used
        for entry in [entry for entry in used if entry not in self._allowed]:
            self._allowed.add(entry)
            self._add_event("allowed", f"{entry} was let pass: {used[entry]}", step, board.at)
        saved, before = board.last_checkpoint, self.board.last_checkpoint
        if saved is not None and (before is None or saved.step != before.step):
            self._add_event("save", "saved", saved.step, board.at - saved.age)
        for slow in self._notices.past:
            text = f"rank {slow.rank} was slow in {slow.what}"
            self._add_event("slow", text, board.step, board.at, slow.since)

    def _add_event(self, kind: str, text: str, step: int, at: float, since: int = 0) -> None:
        """Adds an event to the history.

        Args:
            kind: The kind of event, such as ``restart`` or ``nan``.
            text: What happened, in words.
            step: Steps that were done by then.
            at: Seconds since 1970.
            since: Steps that were done when the event began; 0 if it did not last.
        """
        event = history.RunEvent(at, step, kind, text, min(step, since or step))
        self._history.add_event(event)

    def _write(self, board: JobBoard) -> None:
        """Writes the board, and from time to time its history, into all folders."""
        self._replace(FILE, board.content())
        # Before the first figures it would replace the history that is to be continued.
        due = abs(board.at - self._history_written) >= self._history_period
        if self._history.last and due:
            begin = time.thread_time()
            self._replace(history.FILE, self._history.content())
            took = time.thread_time() - begin
            self._history_written = board.at
            self._history_period = max(_HISTORY_PERIOD, _HISTORY_TIMES * took)

    def _replace(self, name: str, content: object) -> None:
        """Replaces a file in all folders by one with this content, as JSON."""
        text = json.dumps(content)
        for folder in self._board_folders():
            with contextlib.suppress(OSError):
                if name == FILE:
                    self._note_other_writer(folder)
                atomic_file.replace_text(folder / name, text)
                if name == FILE:
                    self._written[folder] = _file_identity(folder / FILE)

    def _note_other_writer(self, folder: Path) -> None:
        """Adds an event if another process has written the board's file in a folder."""
        last = self._written.get(folder)
        if last is not None and _file_identity(folder / FILE) != last and not self._mixed:
            self._mixed = True
            text = "another job writes into this folder: give each a folder of its own"
            self._add_event("mixed", text, self.board.step, self.board.at)

    def _board_folders(self) -> Iterator[Path]:
        """Yields the folders into which the board is written."""
        yield from self._job.progress.folders
        directory = attempt_files.folder()
        if directory is not None:
            yield directory


def _file_identity(path: Path) -> tuple[int, int]:
    """Returns values that change if another file takes the place of the one at ``path``."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


class Reporter:
    """Writes the state of a job from a thread until the job ends."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._writer = BoardWriter(job, time.time())
        self._warnings = log.LogObserver(self._note_warning, logging.WARNING)
        logging.getLogger(log.NAME).addHandler(self._warnings)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleetpipe-board", daemon=True)
        self._thread.start()

    @property
    def board(self) -> JobBoard:
        """The last board."""
        return self._writer.board

    def close(self) -> None:
        """Ends the thread; the last board says that the job has ended."""
        self._ended.set()
        self._thread.join(_LONGEST)
        logging.getLogger(log.NAME).removeHandler(self._warnings)
        if not self._thread.is_alive():  # a thread that hangs could write after the last board
            last = self._job.progress.record(0, "", with_rows=False)
            self._writer.close(last, time.time())

    def _note_warning(self, record: logging.LogRecord) -> None:
        """Adds a warning in the log as an event."""
        if record.name not in _NO_EVENTS:
            first = record.getMessage().partition("\n")[0]
            self._job.progress.note_event("warning", first)

    def _run(self) -> None:
        """Writes board after board until the job ends; runs on the thread."""
        try:
            while not self._ended.wait(PERIOD):
                self._writer.add(self._job.last_records(), time.time())
        except Exception:  # the training goes on without
            _log.exception("the board of the job broke; nobody can watch it any more")


def record_in(folder: Path) -> None:
    """Adds a folder to those into which the first rank of the current job writes its state.

    Does nothing without a job, and on other ranks.
    """
    job = current_job()
    if job is not None and job.leads():
        _warn_of_other_job(folder)
        job.progress.folders.append(folder)
        if not job.keeps_board:
            _keep_board(job)


def _warn_of_other_job(folder: Path) -> None:
    """Logs a warning if another job that runs writes its state into this folder."""
    with contextlib.suppress(ConfigError):
        board = read_board(folder / FILE)
        over = all(rank.state == "ended" for rank in board.ranks)
        if not over and board.seen_at(time.time()) is board:
            _log.warning("another job runs in %s: give each a folder of its own", folder)


def _keep_board(job: Job) -> Reporter:
    """Starts a :class:`Reporter`, which runs until the job ends."""
    reporter = Reporter(job)
    job.keeps_board = True
    job.endings.append(reporter.close)
    return reporter


def begin(job: Job, address: str | None) -> None:
    """Starts to write the state of a job on its first rank, and to serve it as a page.

    Writing and serving end with the job. Raises the errors of ``Server``.

    Args:
        job: The job.
        address: PORT or HOST:PORT to serve at; None serves nothing.
    """
    reporter = _keep_board(job)
    if address is not None:
        from fleetpipe.contrib.view.showing.server import Server

        server = Server(Address.parse(address), lambda: reporter.board.seen_at(time.time()))
        job.endings.append(server.close)
        _log.info("the job can be watched at %s", server.url)
