"""Whether there is another life, decided on how the lives before ended; no rank is started."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from fleetpipe.job.life import PREEMPTED
from fleetpipe.launch.keeping.places import Claim
from fleetpipe.launch.supervisor.leader import Leader
from fleetpipe.launch.supervisor.local import Place
from fleetpipe.launch.supervisor.signals import caught
from fleetpipe.launch.supervisor.verdict import POISONED, Verdict


class Lives:
    """Stands for this host's ranks: each life ends at once, in its turn, as was said before."""

    step = None
    claim = Claim()

    def __init__(self, *verdicts: Verdict) -> None:
        self.running = False
        self.places: list[Place] = []
        self.recorded: list[tuple[int, Verdict]] = []
        self.stopped = self.killed = 0
        self._verdicts = [*verdicts]
        self._ended, self._ends = os.pipe()

    def fileno(self) -> int:
        return self._ended

    def start(self, place: Place) -> None:
        self.places.append(place)
        self.running = True
        if self._verdicts[0].code != -1:
            os.write(self._ends, b"e")

    def end(self) -> Verdict:
        os.read(self._ended, 1)
        self.running = False
        return self._verdicts.pop(0)

    def record(self, number: int, verdict: Verdict) -> None:
        self.recorded.append((number, verdict))

    def stop(self) -> None:
        self.stopped += 1
        os.write(self._ends, b"e")

    def kill(self) -> None:
        self.killed += 1
        os.write(self._ends, b"e")


#: A life that does not end by itself.
LASTING = Verdict(-1)


def killed(step: int | None) -> Verdict:
    return Verdict(137, step=step, culprit="rank 1 died")


def raised(step: int | None, text: str) -> Verdict:
    return Verdict(1, step=step, culprit=f"rank 0 raised: {text}", raised=True)


@pytest.fixture
def signals() -> Iterator[Any]:
    with caught() as found:
        yield found


def lead(lives: Lives, signals: Any, max_restart: int = 3, grace: float = 60.0) -> int:
    options = argparse.Namespace(
        nnodes=(1, 1), master=None, max_restart=max_restart, grace=grace, elastic_timeout=1.0
    )
    return Leader(options, lives, signals).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "code", "last"),
    [
        ([Verdict(0)], 0, 1),
        ([killed(4), raised(9, "x"), Verdict(0)], 0, 3),
        ([killed(4), raised(9, "x"), killed(10), killed(11)], 137, 4),
        ([killed(4), killed(4)], POISONED, 2),
        ([killed(4), killed(5), raised(5, "x")], POISONED, 3),
        ([raised(None, "x"), raised(None, "x")], 1, 2),
        ([raised(None, "x"), raised(None, "y"), killed(None), killed(None)], 137, 4),
        ([Verdict(0, saved=8)], PREEMPTED, 1),
    ],
)
def test_how_lives_end_decides_how_many_there_are(
    signals: Any, ends: list[Verdict], code: int, last: int
) -> None:
    lives = Lives(*ends)
    assert lead(lives, signals) == code
    assert lives.places == [Place(number) for number in range(1, last + 1)]
    told = [*enumerate(ends[:last], 1)]
    # One that did its work has told so itself.
    assert lives.recorded == [pair for pair in told if pair[1] != Verdict(0)]


def test_no_restart_is_one_life(signals: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert lead(Lives(killed(3)), signals, max_restart=0) == 137
    assert capsys.readouterr().err.splitlines() == [
        "fleetpipe: life 1 ended in step 3: rank 1 died",
        "fleetpipe: all 0 restarts are used: the job has failed",
    ]


@pytest.mark.parametrize(
    ("number", "asked", "killed_after_all"),
    [(signal.SIGTERM, 1, 0), (signal.SIGUSR1, 1, 0), (signal.SIGINT, 0, 1)],
)
def test_a_job_that_is_asked_to_stop_is_not_started_again(
    signals: Any, number: signal.Signals, asked: int, killed_after_all: int
) -> None:
    lives = Lives(LASTING)
    os.kill(os.getpid(), number)
    assert lead(lives, signals) == 128 + number
    assert (len(lives.places), lives.stopped, lives.killed) == (1, asked, killed_after_all)
