"""Starts, judges and stops the attempts of this host's ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from fleetpipe import systems
from fleetpipe.arguments import require_folder
from fleetpipe.job import attempt_files, generation, run_files
from fleetpipe.launch.script import (
    LAUNCHED,
    end_sessions,
    remove_logs_beyond,
    script_words,
    signal_ranks,
)
from fleetpipe.launch.supervisor.attempts import Attempt, Verdict, judge
from fleetpipe.launch.supervisor.pods import Order, Pods


class Local:
    """The ranks of this host, for one attempt after another.

    Attributes:
        kept: The folder in memory where they keep their state.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, pods: Pods, board: Any) -> None:
        """Prepares the ranks, and starts none.

        Args:
            options: The options of the command.
            folder: The supervisor's folder in memory.
            pods: The process in which Paddle's launcher runs.
            board: Shows the attempts.
        """
        self._options = options
        self._folder = folder
        self._pods = pods
        self._board = board
        self.kept = folder / "kept"
        self.kept.mkdir()
        #: The folder of the attempt that runs.
        self._home = folder
        #: Its ranks that have the last signal.
        self._signalled: set[int] = set()

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when an attempt ends."""
        return self._pods.fileno()

    def start(self, attempt: Attempt) -> None:
        """Starts an attempt.

        Raises:
            ConfigError: The folder in memory has no room for its files, or that of the logs none.
        """
        require_folder("--log-dir", self._options.log_dir)
        self._home = self._folder / f"attempt-{attempt.number}"
        self._home.mkdir()
        attempt_files.require_space(self._home)
        if self._options.nproc_per_node is not None:
            remove_logs_beyond(Path(self._options.log_dir), self._options.nproc_per_node)
        culprit = "" if attempt.failed is None else attempt.failed.culprit.partition(": ")[0]
        news = f"attempt {attempt.number}, since {culprit}" if culprit else ""
        self._board.begin(self._home, attempt.restarts, news)
        environment = {**self._environment(attempt.number), **attempt.width.environment()}
        self._pods.start(Order(self._arguments(len(attempt.width.places)), environment))

    def end(self) -> Verdict:
        """Judges an attempt that has ended, and kills processes that are left of it."""
        try:
            return judge(self._home, self._pods.code(), shown=0)
        finally:
            end_sessions(self._home)

    def record(self, number: int, verdict: Verdict) -> None:
        """Writes how an attempt ended to the records of its run, for ``fleetpipe report``.

        An attempt that succeeded has written that itself.
        """
        if verdict == Verdict(0):
            return
        end = {
            "event": "end",
            "life": number,
            "time": time.time(),
            "code": verdict.code,
            "saved": verdict.saved,
            "step": verdict.step,
            "culprit": verdict.culprit,
            "details": verdict.details,
        }
        for folder in attempt_files.records(self._home):
            # A disk that is full must not keep the job from being started again.
            with contextlib.suppress(OSError):
                run_files.append_line(folder / run_files.ATTEMPTS, end)

    def has_done_a_step(self) -> bool:
        """Whether the pipeline has done a step in the attempt that runs."""
        return attempt_files.steps_done(self._home) > 0

    def stop(self, number: int) -> None:
        """Signals the ranks to finish their step, save and end; if none has started, none will."""
        self._signalled = set()
        self.stop_late(number)

    def stop_late(self, number: int) -> None:
        """Signals the ranks that have started since the last signal, as :meth:`stop` does."""
        self._signalled = signal_ranks(self._home, number, but=self._signalled)
        if not self._signalled:
            self._pods.stop()

    def kill(self) -> None:
        """Kills the ranks at once, and a launcher that has not started any."""
        generation.refuse(self._home)
        signal_ranks(self._home, systems.SIGKILL)
        self._pods.stop()

    def _arguments(self, fewer: int) -> list[str]:
        """Returns the arguments of Paddle's launcher; ``fewer`` is 0 for all ranks."""
        options = self._options
        ranks = fewer or options.nproc_per_node
        words = ["--log_dir", options.log_dir, "--log_level", options.log_level]
        if ranks is not None:
            words += ["--nproc_per_node", str(ranks)]
        words += [str(LAUNCHED), "run", "--log-level", options.log_level]
        return [*words, *script_words(options)]

    def _environment(self, number: int) -> dict[str, str]:
        variables = {attempt_files.FOLDER: str(self._home), attempt_files.NUMBER: str(number)}
        if self._options.checkpoint_dir is not None:
            variables["FLEETPIPE_CHECKPOINT_DIR"] = os.path.abspath(self._options.checkpoint_dir)
        if self._options.keep_state or self._options.heal or self._options.least:
            variables["FLEETPIPE_KEPT_STATE"] = str(self.kept)
        if self._options.heal:
            variables[generation.HEAL] = str(self._options.max_restart)
        return variables
