"""Starts the ranks of a job on this host, stops them, and restarts all of them if one fails.

Start with :func:`run`. ``Supervisor`` runs one attempt after another, ``LocalRanks`` starts and
stops the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fleetpipe import systems
from fleetpipe.arguments import require_folder
from fleetpipe.errors import ConfigError
from fleetpipe.extras import extra
from fleetpipe.job import attempt_files, run_files
from fleetpipe.launch import streams
from fleetpipe.launch.script import (
    LAUNCHED,
    command_folder,
    end_sessions,
    remove_logs_beyond,
    require_start,
    script_words,
    signal_ranks,
)
from fleetpipe.launch.supervisor.attempts import (
    Attempt,
    EndJob,
    KeptRanks,
    RestartJob,
    Verdict,
    decide_next,
    decide_with_all,
    decide_with_as_many,
    decide_with_fewer,
    judge,
    with_interrupt,
)
from fleetpipe.launch.supervisor.pods import Order, Pods
from fleetpipe.systems import STOP_SIGNALS

#: The signals of Ctrl-C: they stop a job like the others, and a second one ends it at once.
BREAK_SIGNALS = (signal.SIGINT,)

#: Seconds between two searches for ranks that have started after the job was asked to stop.
_LOOK_SECONDS = 0.2
#: The most seconds of one wait: select() accepts no number that a user may give.
_LONGEST_WAIT = 3600.0


class Signals:
    """Collects the signals that arrive while :func:`catch_signals` is open."""

    def __init__(self, received: socket.socket) -> None:
        """Stores the socket into which Python writes the number of each signal."""
        self._received = received

    def fileno(self) -> int:
        """Returns the file descriptor that becomes readable when a signal arrives."""
        return self._received.fileno()

    def take(self) -> list[int]:
        """Returns the numbers of the signals since the last call."""
        with suppress(BlockingIOError):
            return list(self._received.recv(64))
        return []


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Collects signals in the yielded object while the context is open; none ends the process.

    Only the main thread may open it.
    """
    received, sent = socket.socketpair()
    numbers = (*STOP_SIGNALS, *BREAK_SIGNALS)
    before = {number: signal.getsignal(number) for number in numbers}
    with received, sent:
        received.setblocking(False)
        sent.setblocking(False)
        woken = signal.set_wakeup_fd(sent.fileno())
        for number in numbers:
            signal.signal(number, lambda *_: None)
        try:
            yield Signals(received)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)


class LocalRanks:
    """Starts and stops the ranks of this host, for one attempt after another.

    Attributes:
        kept: The folder in memory in which the ranks store their state.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, pods: Pods, board: Any) -> None:
        """Prepares the ranks, and starts none.

        Args:
            options: The options of the command.
            folder: The supervisor's folder in memory.
            pods: The process in which Paddle's launcher runs.
            board: Shows the attempts to the user.
        """
        self._options = options
        self._folder = folder
        self._pods = pods
        self._board = board
        self.kept = folder / "kept"
        self.kept.mkdir()
        #: The folder of the running attempt.
        self._directory = folder
        #: The ranks to which the last signal was sent.
        self._signalled: set[int] = set()

    def fileno(self) -> int:
        """Returns the file descriptor that becomes readable when an attempt ends."""
        return self._pods.fileno()

    def start(self, attempt: Attempt) -> None:
        """Starts an attempt.

        Raises:
            ConfigError: The folder in memory, or the folder of the logs, has no room.
        """
        require_folder("--log-dir", self._options.log_dir)
        self._directory = self._folder / f"attempt-{attempt.number}"
        self._directory.mkdir()
        attempt_files.require_space(self._directory)
        if self._options.nproc_per_node is not None:
            remove_logs_beyond(Path(self._options.log_dir), self._options.nproc_per_node)
        # Such as "rank 1 raised", without the error's text.
        culprit = "" if attempt.failed is None else attempt.failed.culprit.partition(": ")[0]
        reason = f"attempt {attempt.number}, since {culprit}" if culprit else ""
        self._board.begin(self._directory, attempt.restarts, reason)
        environment = {**self._environment(attempt.number), **attempt.positions.environment()}
        self._pods.start(Order(self._arguments(len(attempt.positions.used)), environment))

    def end(self) -> Verdict:
        """Judges the attempt that has ended, and kills processes that it has left."""
        try:
            return judge(self._directory, self._pods.code(), shown=0)
        finally:
            end_sessions(self._directory)

    def record(self, number: int, verdict: Verdict) -> None:
        """Writes how an attempt ended into its run's folders, for ``fleetpipe report``.

        An attempt that succeeded has written its end itself.

        Args:
            number: The number of the attempt.
            verdict: How it ended.
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
        for folder in attempt_files.records(self._directory):
            # A full disk must not prevent the restart of the job.
            with contextlib.suppress(OSError):
                run_files.append_line(folder / run_files.ATTEMPTS, end)

    def has_done_a_step(self) -> bool:
        """Returns whether the pipeline has done a step in the running attempt."""
        return attempt_files.steps_done(self._directory) > 0

    def stop(self, number: int) -> None:
        """Asks the ranks to finish their step, save and end, by a signal.

        If no rank has started yet, the attempt ends at once.
        """
        self._signalled = set()
        self.stop_late(number)

    def stop_late(self, number: int) -> None:
        """Sends signal ``number`` to the ranks that have started since :meth:`stop`."""
        self._signalled = signal_ranks(self._directory, number, excluded=self._signalled)
        if not self._signalled:
            self._pods.stop()

    def kill(self) -> None:
        """Kills the ranks, or a launcher that has not started any."""
        attempt_files.refuse_healing(self._directory)
        signal_ranks(self._directory, systems.SIGKILL)
        self._pods.stop()

    def _arguments(self, fewer: int) -> list[str]:
        """Returns the arguments of Paddle's launcher for ``fewer`` ranks; 0 means all ranks."""
        options = self._options
        ranks = fewer or options.nproc_per_node
        words = ["--log_dir", options.log_dir, "--log_level", options.log_level]
        if ranks is not None:
            words += ["--nproc_per_node", str(ranks)]
        words += [str(LAUNCHED), "run", "--log-level", options.log_level]
        return [*words, *script_words(options)]

    def _environment(self, number: int) -> dict[str, str]:
        """Returns the environment variables for the ranks of attempt ``number``."""
        variables = {attempt_files.FOLDER: str(self._directory), attempt_files.NUMBER: str(number)}
        if self._options.checkpoint_dir is not None:
            variables["FLEETPIPE_CHECKPOINT_DIR"] = os.path.abspath(self._options.checkpoint_dir)
        if self._options.keep_state or self._options.heal or self._options.least:
            variables["FLEETPIPE_KEPT_STATE"] = str(self.kept)
        if self._options.heal:
            variables[attempt_files.HEAL] = str(self._options.max_restart)
        return variables


def run(options: argparse.Namespace) -> int:
    """Runs a job to its end, with as many attempts as it needs.

    Args:
        options: The options of the command.

    Returns:
        0 if every rank succeeded; 75 (``attempt_files.PREEMPTED``) if the job was asked to stop,
        saved and ended; 65 (``POISONED``) if one step failed twice in a row; 130 after Ctrl-C; 128
        + n if signal n stopped it and nothing was saved; else the code of the rank that failed
        first in the last attempt.

    Raises:
        ConfigError: ``--nnodes`` asks for several hosts, ``--least`` is not below the number of
            ranks, ``FLEETPIPE_START`` is wrong, or the folder of the logs or of the checkpoints
            cannot be written to.
        UsageError: Paddle's launcher cannot be loaded.
    """
    require_start()
    if options.nnodes[1] > 1:
        raise ConfigError(
            "without --ray fleetpipe launch starts the ranks of one host",
            got=f"--nnodes {':'.join(map(str, dict.fromkeys(options.nnodes)))}",
            fix="give --ray ADDRESS, or start the script on each host by python -m "
            "paddle.distributed.launch --nnodes",
        )
    if options.least is not None and options.least >= (options.nproc_per_node or math.inf):
        raise ConfigError(
            "--least is a smaller number of ranks than the job begins with",
            got=f"--least {options.least} and --nproc {options.nproc_per_node}",
            fix=f"--least {options.nproc_per_node - 1}, or leave it out"
            if options.nproc_per_node > 1
            else "leave it out",
        )
    checkpoints = options.checkpoint_dir or os.environ.get("FLEETPIPE_CHECKPOINT_DIR")
    if checkpoints:
        require_folder("--checkpoint-dir", checkpoints)
    with ExitStack() as ends:
        signals = ends.enter_context(catch_signals())
        folder = ends.enter_context(command_folder())
        pods = Pods(streams.environment(options.log_level), folder)
        ends.callback(pods.close)
        board = ends.enter_context(extra("view.serving").serving(options.serve))
        return Supervisor(options, LocalRanks(options, folder, pods, board), signals).run()


class Supervisor:
    """Runs one job, from its first attempt to its last."""

    def __init__(self, options: argparse.Namespace, local: LocalRanks, signals: Signals) -> None:
        """Prepares the job, and starts nothing.

        Args:
            options: The options of the command.
            local: Starts and stops the ranks.
            signals: The signals that have arrived.
        """
        self._options = options
        self._local = local
        self._signals = signals
        #: The first signal that asked the job to stop.
        self._stopped_by: int | None = None
        #: The last signal that asked the job to stop, which is sent to the ranks.
        self._signal = 0
        #: When ranks that were asked to stop are killed, as seconds of ``time.monotonic``; infinite
        #: for never, None while nobody has asked them to stop.
        self._deadline: float | None = None
        #: When fewer ranks are asked to save and end, so that all ranks start again, as seconds of
        #: ``time.monotonic``; infinite once they were asked, None in an attempt with all ranks.
        self._all_ranks_at: float | None = None

    def run(self) -> int:
        """Runs one attempt after another, and returns the exit code of the job."""
        attempt = Attempt()
        while True:
            self._deadline = None
            self._all_ranks_at = None
            if attempt.positions.used:
                self._all_ranks_at = time.monotonic() + attempt.positions.seconds
            self._local.start(attempt)
            verdict = self._await_end()
            for number in self._signals.take():
                self._stopped_by = self._stopped_by or number
            verdict = with_interrupt(verdict, self._stopped_by)
            self._local.record(attempt.number, verdict)
            then = self._decide(attempt, verdict)
            for text in then.lines:
                say(text)
            if isinstance(then, EndJob):
                return then.code
            attempt = then.attempt

    def _decide(self, attempt: Attempt, verdict: Verdict) -> EndJob | RestartJob:
        """Decides what follows an attempt that has ended.

        ``options.least``, the smallest number of ranks, is None if the job must have all its ranks.
        ``_all_ranks_at`` is infinite if fewer ranks were asked to save and end, so that all ranks
        start again; then ``verdict.saved`` is their number of steps, or None if they failed to.
        """
        then = decide_next(attempt, verdict, self._options.max_restart, self._stopped_by)
        if self._options.least is None or self._stopped_by is not None:
            return then  # the number of ranks is fixed, or the user has stopped the job
        if self._all_ranks_at == math.inf and verdict.saved is not None:
            return decide_with_all(attempt, verdict.saved)
        if verdict.code == 0 or verdict.saved is not None:
            return then  # the job is complete, or something else asked it to save and end
        if self._all_ranks_at == math.inf:
            return decide_with_as_many(attempt, then)  # asked in vain
        # A rank failed by itself: its position may be given up.
        options = self._options
        return decide_with_fewer(
            attempt, verdict, then, self._newest_kept, options.least, options.wider_after
        )

    def _newest_kept(self) -> KeptRanks | None:
        """Returns the newest state that the ranks have stored in memory; None if there is none."""
        kept = extra("kept_state").newest_kept(self._local.kept)
        return None if kept is None else KeptRanks(*kept)

    def _await_end(self) -> Verdict:
        """Waits for the end of the running attempt, and handles signals; returns the verdict."""
        sources: list[Signals | LocalRanks] = [self._signals, self._local]
        while True:
            timeout = None
            if self._deadline is not None:
                timeout = min(_LOOK_SECONDS, max(0.0, self._deadline - time.monotonic()))
            elif self._all_ranks_at is not None:
                timeout = min(_LONGEST_WAIT, max(0.0, self._all_ranks_at - time.monotonic()))
            ready, _, _ = select.select(sources, [], [], timeout)
            for number in self._signals.take() if self._signals in ready else ():
                self._handle_signal(number)
            if self._local in ready:
                return self._local.end()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._deadline = None
                self._local.kill()
            elif self._deadline is not None and not ready:
                # Ranks may have started after the others were asked to stop.
                self._local.stop_late(self._signal)
            elif self._all_ranks_at is not None and time.monotonic() >= self._all_ranks_at:
                # Not before the attempt has done a step: it has nothing new to save until then.
                if self._local.has_done_a_step():
                    self._all_ranks_at = math.inf
                    # Without a limit, since the ranks train until they end.
                    self._ask_to_stop(signal.SIGTERM, grace=math.inf)
                else:
                    self._all_ranks_at = time.monotonic() + _LOOK_SECONDS

    def _handle_signal(self, number: int) -> None:
        """Asks the ranks to save and end; Ctrl-C after another signal ends them at once.

        Any other signal that comes again is sent to the ranks again.
        """
        # The first signal is stored; ``earlier`` is None if this one is it.
        earlier, self._stopped_by = self._stopped_by, self._stopped_by or number
        if number in BREAK_SIGNALS and earlier is not None:
            self._deadline = time.monotonic()
            return
        if earlier is None and number in BREAK_SIGNALS:
            say("ends after this step, which is saved; Ctrl-C once more ends it at once")
        self._ask_to_stop(number, self._options.grace)

    def _ask_to_stop(self, number: int, grace: float) -> None:
        """Asks the ranks to finish their step, save and end, by signal ``number``.

        Args:
            number: The signal.
            grace: The seconds after which they are killed.
        """
        self._deadline = min(self._deadline or math.inf, time.monotonic() + grace)
        self._signal = number
        self._local.stop(number)


def say(text: str) -> None:
    """Prints a line for the user on standard error."""
    sys.stdout.flush()
    sys.stderr.write(f"fleetpipe: {text}\n")
    sys.stderr.flush()
