"""Starts the ranks of a job, and starts all of them again where one fails."""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import sys
import time
from pathlib import Path

from fleetpipe.job import life
from fleetpipe.launch import quiet
from fleetpipe.launch.script import LAUNCHED, in_a_shell
from fleetpipe.launch.supervisor.pods import Order, Pods, end_sessions, signal_ranks
from fleetpipe.launch.supervisor.room import room
from fleetpipe.launch.supervisor.signals import BREAK_SIGNALS, Signals, caught
from fleetpipe.launch.supervisor.verdict import POISONED, Verdict, judge


def run(options: argparse.Namespace) -> int:
    """Runs a job to its end, however often it has to be started.

    Returns:
        0 where every rank did its work; 75 (``life.PREEMPTED``) where the job was asked to stop,
        saved and ended; 65 (``POISONED``) where one step failed twice in a row; 128 + n where
        signal n stopped it and nothing was saved; else the code of the rank that failed first in
        the last life.
    """
    with room() as folder, caught() as signals:
        pods = Pods(quiet.environment(options.log_level))
        try:
            return _Supervisor(options, folder, signals, pods).run()
        finally:
            pods.close()


class _Supervisor:
    """One job, from its first life to its last."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, signals: Signals, pods: Pods
    ) -> None:
        self._options = options
        self._folder = folder
        self._signals = signals
        self._pods = pods
        self._stopped_by: int | None = None
        self._kept = folder / "kept"
        self._kept.mkdir()

    def run(self) -> int:
        """Runs one life after another; returns the exit code of the job."""
        last = None
        for number in range(1, self._options.max_restart + 2):
            verdict = self._live(number)
            if verdict.saved is not None:
                _say(f"asked to stop, the job saved {verdict.saved} steps and ended")
                return life.PREEMPTED
            if verdict.code == 0:
                return 0
            _say(_account(number, verdict))
            if self._stopped_by is not None:
                return in_a_shell(-self._stopped_by)
            if last is not None and verdict.repeats(last):
                _say(_poison(verdict))
                return POISONED if verdict.step is not None else verdict.code
            last = verdict
            if number <= self._options.max_restart:
                _say(f"life {number + 1} begins: restart {number} of {self._options.max_restart}")
        _say(f"all {self._options.max_restart} restarts are used: the job has failed")
        return verdict.code

    def _live(self, number: int) -> Verdict:
        """Runs one life to its end, and ends what is left of it."""
        home = self._folder / f"life-{number}"
        home.mkdir()
        self._pods.start(self._order(number, home))
        try:
            self._attend(home)
            return judge(home, self._pods.code())
        finally:
            end_sessions(home)

    def _order(self, number: int, home: Path) -> Order:
        options = self._options
        arguments = ["--log_dir", options.log_dir, "--log_level", options.log_level]
        if options.nproc_per_node is not None:
            arguments += ["--nproc_per_node", str(options.nproc_per_node)]
        arguments += [str(LAUNCHED), "run", "--log-level", options.log_level]
        arguments += [str(options.script), *options.arguments]
        environment = {life.FOLDER: str(home), life.NUMBER: str(number)}
        if options.checkpoint_dir is not None:
            environment["FLEETPIPE_CHECKPOINT_DIR"] = os.path.abspath(options.checkpoint_dir)
        if options.keep_state:
            environment["FLEETPIPE_KEPT_STATE"] = str(self._kept)
        return Order(arguments, environment)

    def _attend(self, home: Path) -> None:
        """Waits for the end of a life; what asks the supervisor to stop goes to its ranks."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pods, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            deadline: float | None = None
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = {key.fileobj for key, _ in selector.select(left)}
                if self._pods in ready:
                    return
                for number in self._signals.take():
                    self._stopped_by = self._stopped_by or number
                    if number in BREAK_SIGNALS:
                        deadline = time.monotonic()
                    elif deadline is None:
                        deadline = time.monotonic() + self._options.grace
                        signal_ranks(home, signal.SIGTERM)
                if deadline is not None and time.monotonic() >= deadline:
                    deadline = None
                    signal_ranks(home, signal.SIGKILL)


def _account(number: int, verdict: Verdict) -> str:
    """Says how a life ended that did not do its work."""
    when = "" if verdict.step is None else f" in step {verdict.step}"
    lines = [f"life {number} ended{when}: {verdict.culprit}"]
    return "\n".join([*lines, *(f"    | {line}" for line in verdict.details.splitlines())])


def _poison(verdict: Verdict) -> str:
    what = "the job failed twice in a row with the same error, and before any step that it told of"
    if verdict.step is not None:
        what = f"step {verdict.step} failed twice in a row"
    return (
        f"{what}: it is not started again\n"
        "  what to do: look at the data of this step and at the error above; a job that is started "
        "anew goes on from its checkpoint"
    )


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"fleetpipe: {text}\n")
    sys.stderr.flush()
