"""What signals do to a job; no rank is started."""

from __future__ import annotations

import argparse
import os
import signal

import pytest

from fleetpipe.launch.supervisor.attempts import Attempt, Verdict
from fleetpipe.launch.supervisor.signals import catch_signals
from fleetpipe.launch.supervisor.supervisor import Supervisor


class Ranks:
    """Stands for those of this host: an attempt ends when it is asked to, as was said before."""

    def __init__(self, verdict: Verdict) -> None:
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
        os.write(self._ends, b"e")

    def kill(self) -> None:
        self.killed += 1


def supervise(ranks: Ranks, *numbers: int) -> int:
    options = argparse.Namespace(max_restart=3, grace=60.0)
    with catch_signals() as signals:
        for number in numbers:
            os.kill(os.getpid(), number)
        return Supervisor(options, ranks, signals).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "killed"),
    [
        ([signal.SIGTERM], 0),
        ([signal.SIGUSR1], 0),
        ([signal.SIGINT], 0),
        ([signal.SIGINT, signal.SIGINT], 1),
        ([signal.SIGTERM, signal.SIGTERM], 0),
        ([signal.SIGTERM, signal.SIGINT], 1),
    ],
)
def test_the_first_asks_for_the_end_and_ctrl_c_after_it_has_it_at_once(
    numbers: list[signal.Signals], killed: int
) -> None:
    ranks = Ranks(Verdict(137, culprit="rank 0 was ended"))
    assert supervise(ranks, *numbers) == 128 + numbers[0]
    assert (ranks.started, ranks.stopped) == ([1], [numbers[0]])
    assert ranks.killed == killed


@pytest.mark.parametrize("saved", [None, 8])
def test_what_ctrl_c_ended_is_said_and_recorded_as_interrupted(
    capsys: pytest.CaptureFixture[str], saved: int | None
) -> None:
    ranks = Ranks(Verdict(0 if saved else 137, saved, culprit="rank 0 was ended"))
    assert supervise(ranks, signal.SIGINT) == 130
    *_, last = capsys.readouterr().err.splitlines()
    assert last == f"fleetpipe: interrupted{', the job saved 8 steps' if saved else ''}"
    assert ranks.recorded == [(1, Verdict(130, saved, culprit="interrupted"))]
