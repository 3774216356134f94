"""What signals do to a job; no rank is started."""

from __future__ import annotations

import argparse
import errno
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.job import attempt_files
from fleetpipe.launch.supervisor.attempts import Attempt, Verdict
from fleetpipe.launch.supervisor.local_ranks import Local
from fleetpipe.launch.supervisor.narrowing import KeptRanks
from fleetpipe.launch.supervisor.signals import catch_signals
from fleetpipe.launch.supervisor.supervisor import Supervisor


class Ranks:
    """Stands for those of this host: an attempt ends when it is asked to, as was said before.

    Where they start late it ends when it is asked again.
    """

    def __init__(self, verdict: Verdict, late: bool = False) -> None:
        self.late = late
        self.started: list[int] = []
        self.recorded: list[tuple[int, Verdict]] = []
        self.stopped: list[int] = []
        self.killed = 0
        self._verdict = verdict
        self._ended, self._ends = os.pipe()

    def fileno(self) -> int:
        return self._ended

    def start(self, attempt: Attempt) -> None:
        self.started.append(attempt.number)

    def end(self) -> Verdict:
        os.close(self._ended)
        os.close(self._ends)
        return self._verdict

    def record(self, number: int, verdict: Verdict) -> None:
        self.recorded.append((number, verdict))

    def stop(self, number: int) -> None:
        self.stopped.append(number)
        if not self.late:
            os.write(self._ends, b"e")

    def stop_late(self, number: int) -> None:
        self.late = False
        self.stop(number)

    def kill(self) -> None:
        self.killed += 1


def supervise(ranks: Ranks, *numbers: int, **options: float) -> int:
    usual = {"max_restart": 3, "grace": 60.0, "least": None}
    chosen = argparse.Namespace(**{**usual, **options})
    with catch_signals() as signals:
        for number in numbers:
            os.kill(os.getpid(), number)
        return Supervisor(chosen, ranks, signals).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "given", "killed"),
    [
        ([signal.SIGTERM], 1, 0),
        ([signal.SIGUSR1], 1, 0),
        ([signal.SIGINT], 1, 0),
        ([signal.SIGINT, signal.SIGINT], 1, 1),
        ([signal.SIGTERM, signal.SIGTERM], 2, 0),
        ([signal.SIGTERM, signal.SIGINT], 1, 1),
    ],
)
def test_the_first_asks_for_the_end_and_ctrl_c_after_it_has_it_at_once(
    numbers: list[signal.Signals], given: int, killed: int
) -> None:
    ranks = Ranks(Verdict(137, culprit="rank 0 was ended"))
    assert supervise(ranks, *numbers) == 128 + numbers[0]
    assert (ranks.started, ranks.stopped) == ([1], numbers[:given])
    assert ranks.killed == killed


def test_a_signal_that_comes_before_the_ranks_is_kept_for_them() -> None:
    ranks = Ranks(Verdict(0, 8), late=True)
    assert supervise(ranks, signal.SIGUSR1) == 75
    assert ranks.stopped == [signal.SIGUSR1] * 2


def test_a_signal_between_two_attempts_lets_no_other_begin() -> None:
    class Failing(Ranks):
        def start(self, attempt: Attempt) -> None:
            super().start(attempt)
            os.write(self._ends, b"e")

        def end(self) -> Verdict:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().end()

    ranks = Failing(Verdict(1, step=3, culprit="rank 0 raised"))
    assert supervise(ranks) == 128 + signal.SIGTERM
    assert (ranks.started, ranks.stopped) == ([1], [])


def test_fewer_ranks_that_end_for_the_sake_of_all_may_take_their_time_or_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = Verdict(137, step=3, culprit="rank 1 died", place=1)
    full = Verdict(1, step=4, culprit="rank 0 raised: CheckpointError", raised=True)
    verdicts = [died, full, Verdict(0, 5), Verdict(0)]

    class Narrowed(Ranks):
        def start(self, attempt: Attempt) -> None:
            super().start(attempt)
            self.late = bool(attempt.width.places)
            if attempt.number > 1:
                self._ended, self._ends = os.pipe()
            if not self.late:
                os.write(self._ends, b"e")

        def has_done_a_step(self) -> bool:
            return True

        def end(self) -> Verdict:
            super().end()
            return verdicts.pop(0)

    monkeypatch.setattr(Supervisor, "_newest_kept", lambda _: KeptRanks(3, 2, (1,)))
    ranks = Narrowed(Verdict(0))
    assert supervise(ranks, grace=0.0, max_restart=0, least=1, wider_after=0.0) == 0
    assert (ranks.started, ranks.killed) == ([1, 2, 3, 4], 0)
    assert ranks.stopped == [signal.SIGTERM] * 4


def test_each_rank_gets_a_signal_once_whenever_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *process: sent.append(process))
    pods = Mock()
    local = Local(argparse.Namespace(), tmp_path, pods, Mock())
    local.stop(signal.SIGTERM)
    for rank in range(2):
        attempt_files.note_start(tmp_path, rank, 100 + rank)
        local.stop_late(signal.SIGTERM)
    assert sent == [(100, signal.SIGTERM), (101, signal.SIGTERM)]
    pods.stop.assert_called_once_with()
    local.stop(signal.SIGUSR1)
    assert sent[2:] == [(100, signal.SIGUSR1), (101, signal.SIGUSR1)]


def test_no_attempt_starts_whose_logs_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fleetpipe.arguments._write_into", full)
    options = argparse.Namespace(log_dir=str(tmp_path / "log"))
    with pytest.raises(ConfigError, match=r"--log-dir: cannot use (?s:.*)No space left"):
        Local(options, tmp_path, Mock(), Mock()).start(Attempt(2))


@pytest.mark.parametrize("saved", [None, 8])
def test_what_ctrl_c_ended_is_said_and_recorded_as_interrupted(
    capsys: pytest.CaptureFixture[str], saved: int | None
) -> None:
    ranks = Ranks(Verdict(0 if saved else 137, saved, culprit="rank 0 was ended"))
    assert supervise(ranks, signal.SIGINT) == 130
    *_, last = capsys.readouterr().err.splitlines()
    more = ", the job saved 8 steps: the same command goes on from there"
    assert last == f"fleetpipe: interrupted{more if saved else ''}"
    assert ranks.recorded == [(1, Verdict(130, saved, culprit="interrupted"))]
