"""The launcher's part in healing: it forks a process, with Paddle loaded, to replace a rank.

Start with ``Healer.settle``, which the launcher calls again and again.
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
_ENDED = "rank {} has ended its work, and meets no other process"


class Rank(WatchedProcess):
    """The present process of a rank, as Paddle's launcher watches it."""

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
        """Returns the exit code of the last process; None while one runs or will replace it."""
        self._healer.settle()
        return self.code

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it has not ended."""
        self.process.send_signal(number)


class Healer:
    """Decides for each rank that ends whether a process replaces it, and starts that process.

    It has no thread: a lock that a thread holds at a fork would stay locked in the child.
    """

    def __init__(self, home: Path, most: int) -> None:
        """Prepares to heal an attempt.

        Args:
            home: The folder of the attempt.
            most: The number of processes that may be replaced.
        """
        self._ranks: list[Rank] = []
        self._home = home
        self._left = most
        self._generation = Generation()
        self._replaced: list[tuple[int, int]] = []
        #: The (rank, step) in which an error was raised; a replacement may raise it again.
        self._raised: set[tuple[int, int]] = set()
        self._loaded = False

    def hold(self, started: RankProcess) -> Rank:
        """Returns the object that the launcher watches in place of a process."""
        self._ranks.append(Rank(started, self))
        return self._ranks[-1]

    def settle(self) -> None:
        """Handles the ranks that have ended since the last call.

        The first call, after the ranks have been started, loads the modules of a replacement.
        """
        if not self._loaded:
            self._loaded = True
            forked_ranks.load()
            importlib.import_module(_REPLACEMENT)
        running = [rank for rank in self._ranks if rank.code is None]
        ended = [(rank, code) for rank in running if (code := rank.process.poll()) is not None]
        # Ranks that end because another one ended (EXIT_CODE) come last.
        for rank, code in sorted(ended, key=lambda end: end[1] == EXIT_CODE):
            number = rank.started.rank
            why_not = self._obstacle(number, code) if code else ""
            if code and not why_not:
                self._replace(rank, code)
                continue
            if not code and self._waits_for(number):
                why_not = _ENDED.format(number)
            if why_not and not self._generation.refused:
                self._refuse(why_not, code)
            attempt_files.note_end(self._home, number, code)
            rank.code = code
        self._refuse_ended()

    def _refuse_ended(self) -> None:
        """Refuses to heal if a rank has ended with 0 during the job, as by ``os._exit``.

        The others have noticed a death and wait for a process, which an end with 0 does not start.
        """
        ended = [rank.started.rank for rank in self._ranks if rank.code == 0]
        if ended and not self._generation.refused:
            failed = [one.failure for one in attempt_files.failures(self._home)]
            for rank in (one.rank for one in failed if one.rank in ended and one.what == "died"):
                self._refuse(_ENDED.format(rank), 0)
                return

    def _waits_for(self, rank: int) -> bool:
        """Whether a process that replaces another waits for a rank."""
        now = self._generation.number
        return bool(now) and rank not in attempt_files.waiting_places(self._home, now)

    def _obstacle(self, rank: int, code: int) -> str:
        """Returns why the process of a rank cannot be replaced; empty if it can."""
        if self._generation.refused:
            return self._generation.refused
        if code == -signal.SIGTERM or attempt_files.is_healing_refused(self._home):
            return "the job is ended"
        for file in sorted(self._home.glob("unhealed.*")):
            return file.read_text(encoding="utf-8")
        ranks = {number for number, _ in attempt_files.started_ranks(self._home)}
        folder = Path(os.environ[kept_state.FOLDER])
        if not all(any(folder.glob(f"rank-{number}.*")) for number in ranks):
            return "not every rank has kept a step, as a script does that goes by fleetpipe.resume"
        for ended in (held.started.rank for held in self._ranks if held.code == 0):
            return _ENDED.format(ended)
        if attempt_files.preempted_at(self._home) is not None:
            return "the job was asked to stop"
        failures = [report.failure for report in attempt_files.failures(self._home)]
        if any(failure.permanent for failure in failures):
            return "no other process would do better"
        if any(one.rank == rank and one.what not in ("died", "raised") for one in failures):
            return "no rank died: a wait has ended"
        if code == EXIT_CODE == attempt_files.code_of(self._home, rank):
            return f"rank {rank} noticed a death where it cannot go back"
        step = attempt_files.steps_begun(self._home).get(rank, -1)
        if any(failure.rank == rank and failure.what == "raised" for failure in failures):
            if (rank, step) in self._raised:
                return f"rank {rank} raised an error in step {step} again"
            self._raised.add((rank, step))
        if not self._left:
            return "as many processes were replaced as --max-restart allows"
        return ""

    def _refuse(self, why: str, code: int) -> None:
        """Ends the healing of this attempt; a replaced rank that has not joined counts first."""
        self._generation = self._generation._replace(refused=why)
        attempt_files.write_generation(self._home, self._generation)
        waiting = attempt_files.waiting_places(self._home, self._generation.number)
        if self._replaced and waiting:
            attempt_files.note_end(self._home, *self._replaced[-1])
        sys.stderr.write(f"fleetpipe: the job does not heal: {why}\n")

    def _replace(self, rank: Rank, code: int) -> None:
        number, before = rank.started.rank, self._generation
        self._left -= 1
        self._replaced.append((number, code))
        systems.end_session(rank.pid)  # the children that the rank has left
        for file in ("place", "code"):
            (self._home / f"{file}.{number}").unlink(missing_ok=True)
        now = before.number + 1
        self._generation = Generation(now, {**before.since, number: now})
        attempt_files.write_generation(self._home, self._generation)
        rank.process = forked_ranks.fork(_program(rank.started, now))
        attempt_files.note_start(self._home, number, rank.pid)


def holder(home: Path) -> Callable[[RankProcess], Rank]:
    """Returns the function by which the launcher of an attempt heals it."""
    return Healer(home, int(os.environ[attempt_files.HEAL])).hold


def _program(started: RankProcess, number: int) -> Program:
    """Returns the program that takes the place of a process in a generation."""
    early = {name: value for name, value in os.environ.items() if name.startswith(EARLY)}
    environment = {**early, **started.environment, attempt_files.BEGAN: str(number)}

    def prepare() -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stop in systems.STOP_SIGNALS:  # until the script goes by fleetpipe.resume
            signal.signal(stop, attempt_files.note_signal)
        importlib.import_module(_REPLACEMENT).ENVIRONMENT.update(os.environ)

    return Program(started.words, environment, started.log, started.log, prepare)
