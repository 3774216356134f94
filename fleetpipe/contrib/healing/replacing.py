"""The launcher's part in healing: it forks a process, with Paddle loaded, to replace a rank.

Start with ``Healer.handle_ended_processes``, which the launcher calls again and again.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetpipe import systems
from fleetpipe.contrib.kept_state import kept_state
from fleetpipe.job import attempt_files
from fleetpipe.job.attempt_files import Generation
from fleetpipe.job.watch import EXIT_CODE
from fleetpipe.launch import forked_ranks
from fleetpipe.launch.forked_ranks import EARLY, Program, WatchedProcess
from fleetpipe.paddle_api.launcher import RankProcess

#: The module that is loaded before a fork, and imports Paddle.
_REPLACEMENT = "fleetpipe.contrib.healing.replacement"
#: The reason not to heal if a rank has ended with 0.
_ENDED = "rank {} has ended its work, and meets no other process"


class Rank(WatchedProcess):
    """The present process of a rank, as Paddle's launcher watches it.

    Attributes:
        started: The first process, with the command and the environment that the launcher gave it.
        process: The process that runs now, or ran last.
        code: The exit code of the last process; None while it runs or will be replaced.
    """

    def __init__(self, started: RankProcess, healer: Healer) -> None:
        self.started = started
        self.process: Any = started.process
        self.code: int | None = None
        self._healer = healer

    @property
    def pid(self) -> int:
        """The number of the process."""
        return int(self.process.pid)

    def poll(self) -> int | None:
        """Returns the exit code of the rank's last process; None while one runs or will run.

        First the healer handles the processes that have ended, and may start others.
        """
        self._healer.handle_ended_processes()
        return self.code

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it has not ended."""
        self.process.send_signal(number)


class Healer:
    """Decides whether a new process replaces a rank's process that ended, and starts it.

    No thread is used: a lock that a thread holds at a fork would stay locked in the child.
    """

    def __init__(self, directory: Path, most_replaced: int) -> None:
        """Prepares to heal an attempt.

        Args:
            directory: The directory of the attempt's files.
            most_replaced: The number of processes that may be replaced, in all ranks together.
        """
        self._ranks: list[Rank] = []
        self._directory = directory
        self._replacements_left = most_replaced
        #: The processes of all ranks since the last replacement; see ``Generation``.
        self._generation = Generation()
        #: The rank and the exit code of each process that was replaced.
        self._replaced: list[tuple[int, int]] = []
        #: The ranks and steps in which an error was raised; a replacement may raise it again.
        self._raised_in: set[tuple[int, int]] = set()
        self._loaded = False

    def watch(self, started: RankProcess) -> Rank:
        """Takes a process that has started; returns what the launcher watches in its place."""
        self._ranks.append(Rank(started, self))
        return self._ranks[-1]

    def handle_ended_processes(self) -> None:
        """Replaces processes that have ended since the last call, or records that they ended.

        The first call, after the ranks have been started, loads the modules of a replacement.
        """
        if not self._loaded:
            self._loaded = True
            forked_ranks.load()
            importlib.import_module(_REPLACEMENT)
        running = [rank for rank in self._ranks if rank.code is None]
        ended = [(rank, code) for rank in running if (code := rank.process.poll()) is not None]
        # Ranks that end with EXIT_CODE, because another one has ended, come last.
        for rank, code in sorted(ended, key=lambda end: end[1] == EXIT_CODE):
            number = rank.started.rank
            why_not = self._reason_against(number, code) if code else ""
            if code and not why_not:
                self._replace(rank, code)
                continue
            if not code and self._is_awaited(number):
                why_not = _ENDED.format(number)
            if why_not and not self._generation.refused:
                self._refuse(why_not)
            attempt_files.note_end(self._directory, number, code)
            rank.code = code
        self._refuse_ended()

    def _refuse_ended(self) -> None:
        """Refuses to heal if a rank has ended with 0 during the job, such as by ``os._exit``.

        The other ranks then wait for a new process, but an end with 0 starts none.
        """
        ended = [rank.started.rank for rank in self._ranks if rank.code == 0]
        if ended and not self._generation.refused:
            failures = [report.failure for report in attempt_files.failures(self._directory)]
            for failure in failures:
                if failure.rank in ended and failure.what == "died":
                    self._refuse(_ENDED.format(failure.rank))
                    return

    def _is_awaited(self, rank: int) -> bool:
        """Returns whether the other ranks still wait for a rank whose process has ended.

        That is so if some process was replaced, and the rank is not among those that have come to
        connect with the new process.
        """
        now = self._generation.number
        return bool(now) and rank not in attempt_files.waiting_places(self._directory, now)

    def _reason_against(self, rank: int, code: int) -> str:
        """Returns why the process of a rank cannot be replaced; empty if it can.

        Args:
            rank: The rank.
            code: The exit code of its process.
        """
        if self._generation.refused:
            return self._generation.refused
        if code == -signal.SIGTERM or attempt_files.is_healing_refused(self._directory):
            return "the job is ended"
        # A rank that cannot go on with a replaced process has written why.
        for file in sorted(self._directory.glob("unhealed.*")):
            return file.read_text(encoding="utf-8")
        # The new process goes on from a stored state, of which each rank has its own part.
        ranks = {number for number, _ in attempt_files.started_ranks(self._directory)}
        folder = Path(os.environ[kept_state.FOLDER])
        if not all(any(folder.glob(f"rank-{number}.*")) for number in ranks):
            return "not every rank has kept a step, as a script does that goes by fleetpipe.resume"
        for ended in self._ranks:
            if ended.code == 0:
                return _ENDED.format(ended.started.rank)
        if attempt_files.steps_saved_at_stop(self._directory) is not None:
            return "the job was asked to stop"
        failures = [report.failure for report in attempt_files.failures(self._directory)]
        if any(failure.permanent for failure in failures):
            return "no other process would do better"
        of_rank = [failure.what for failure in failures if failure.rank == rank]
        if any(what not in ("died", "raised") for what in of_rank):
            return "no rank died: a wait has ended"
        if code == EXIT_CODE == attempt_files.reported_exit_code(self._directory, rank):
            return f"rank {rank} noticed a death where it cannot go back"
        step = attempt_files.steps_begun(self._directory).get(rank, -1)
        if "raised" in of_rank:
            if (rank, step) in self._raised_in:
                return f"rank {rank} raised an error in step {step} again"
            self._raised_in.add((rank, step))
        if not self._replacements_left:
            return "as many processes were replaced as --max-restart allows"
        return ""

    def _refuse(self, why: str) -> None:
        """Ends the healing of this attempt, and tells the ranks why.

        If the last replaced process has not met the others yet, its exit is recorded first, so that
        it counts as the cause.
        """
        self._generation = self._generation._replace(refused=why)
        attempt_files.write_generation(self._directory, self._generation)
        waiting = attempt_files.waiting_places(self._directory, self._generation.number)
        if self._replaced and waiting:
            attempt_files.note_end(self._directory, *self._replaced[-1])
        sys.stderr.write(f"fleetpipe: the job does not heal: {why}\n")

    def _replace(self, rank: Rank, code: int) -> None:
        """Forks the process that replaces the one of a rank, which ended with ``code``."""
        number, before = rank.started.rank, self._generation
        self._replacements_left -= 1
        self._replaced.append((number, code))
        systems.end_session(rank.pid)  # the children that the rank has left
        # What the ended process has written about itself is not true of the new one.
        for file in ("place", "code"):
            (self._directory / f"{file}.{number}").unlink(missing_ok=True)
        now = before.number + 1
        self._generation = Generation(now, {**before.since, number: now})
        attempt_files.write_generation(self._directory, self._generation)
        rank.process = forked_ranks.fork(_replacement_program(rank.started, now))
        attempt_files.note_start(self._directory, number, rank.pid)


def rank_watcher(directory: Path) -> Callable[[RankProcess], Rank]:
    """Returns a function that the launcher calls with each process that it has started.

    The function returns an object that the launcher watches instead of the process: it replaces a
    process that dies.

    Args:
        directory: The directory of the attempt's files.
    """
    return Healer(directory, int(os.environ[attempt_files.HEAL])).watch


def _replacement_program(started: RankProcess, number: int) -> Program:
    """Returns the program of a process that replaces another one.

    Args:
        started: The process of the rank that the launcher started.
        number: The generation that begins with the new process.
    """
    # Paddle reads variables with a prefix of EARLY when it is loaded, as it is in this process.
    early = {name: value for name, value in os.environ.items() if name.startswith(EARLY)}
    environment = {**early, **started.environment, attempt_files.BEGAN: str(number)}

    def prepare() -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stop in systems.STOP_SIGNALS:  # until the script goes by fleetpipe.resume
            signal.signal(stop, attempt_files.note_signal)
        importlib.import_module(_REPLACEMENT).ENVIRONMENT.update(os.environ)

    return Program(started.words, environment, started.log, started.log, prepare)
