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
from fleetpipe.launch.supervisor import leader as module
from fleetpipe.launch.supervisor.leader import Leader
from fleetpipe.launch.supervisor.local import Place
from fleetpipe.launch.supervisor.signals import caught
from fleetpipe.launch.supervisor.verdict import POISONED, Verdict


class Lives:
    """Stands for this host's ranks: each life ends at once, in its turn, as was said before."""

    step = None

    def __init__(self, *verdicts: Verdict, lasting: bool = False) -> None:
        self.lasting = lasting
        self.running = False
        self.claim = Claim()
        self.places: list[Place] = []
        self.recorded: list[tuple[int, Verdict]] = []
        self.stopped = self.killed = 0
        self._verdicts = [*verdicts]
        self._ended, self._ends = os.pipe()

    def fileno(self) -> int:
        return self._ended

    def start(self, place: Place) -> None:
        self.places.append(place)
        self.claim = Claim(place.life, place.nodes, place.node)
        self.running = True
        if self._verdicts[0].code != -1 and not self.lasting:
            os.write(self._ends, b"e")

    def end(self) -> Verdict:
        os.read(self._ended, 1)
        self.running = False
        return self._verdicts.pop(0)

    def record(self, number: int, verdict: Verdict) -> None:
        self.recorded.append((number, verdict))

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.stopped += 1
        os.write(self._ends, b"e")

    def kill(self) -> None:
        self.killed += 1
        if self.running:
            os.write(self._ends, b"e")


#: A life that does not end by itself.
LASTING = Verdict(-1)


def disk_full(step: int) -> Verdict:
    text = "rank 0 raised: CheckpointError: step 4 cannot be saved"
    details = "CheckpointError: ..\n  got: [Errno 28] No space left on device"
    return Verdict(1, step=step, culprit=text, details=details, raised=True)


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
        nnodes=(1, 1),
        master=None,
        max_restart=max_restart,
        grace=grace,
        elastic_timeout=1.0,
        neighbour_every=None,
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
        ([disk_full(4), disk_full(4)], 1, 2),
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


def test_a_full_disk_is_not_the_fault_of_a_step(
    signals: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lead(Lives(disk_full(4), disk_full(4)), signals)
    said = capsys.readouterr().err
    assert "step 4 failed twice in a row" in said
    assert "what to do: free space on the disk" in said
    assert "data of this step" not in said


def test_no_restart_is_one_life(signals: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert lead(Lives(killed(3)), signals, max_restart=0) == 137
    assert capsys.readouterr().err.splitlines() == [
        "fleetpipe: life 1 ended in step 3: rank 1 died",
        "fleetpipe: all 0 restarts are used: the job has failed",
    ]


@pytest.mark.parametrize(
    ("numbers", "asked", "killed_after_all"),
    [
        ([signal.SIGTERM], 1, 0),
        ([signal.SIGUSR1], 1, 0),
        ([signal.SIGINT], 1, 0),
        ([signal.SIGINT, signal.SIGINT], 1, 1),
        ([signal.SIGTERM, signal.SIGINT], 1, 1),
    ],
)
def test_a_job_that_is_asked_to_stop_is_not_started_again(
    signals: Any, numbers: list[signal.Signals], asked: int, killed_after_all: int
) -> None:
    lives = Lives(LASTING)
    for number in numbers:
        os.kill(os.getpid(), number)
    assert lead(lives, signals) == 128 + numbers[0]
    assert (len(lives.places), lives.stopped, lives.killed) == (1, asked, killed_after_all)


@pytest.mark.parametrize("saved", [None, 8])
def test_what_ctrl_c_ended_was_interrupted(
    signals: Any, capsys: pytest.CaptureFixture[str], saved: int | None
) -> None:
    lives = Lives(Verdict(0 if saved else 137, saved, culprit="rank 0 was ended"), lasting=True)
    os.kill(os.getpid(), signal.SIGINT)
    assert lead(lives, signals) == 130
    *_, last = capsys.readouterr().err.splitlines()
    assert last == f"fleetpipe: interrupted{', the job saved 8 steps' if saved else ''}"
    assert lives.recorded == [(1, Verdict(130, saved, culprit="interrupted"))]


class Other:
    """Stands for the connection to another host's supervisor, which is lost when it is told so."""

    def __init__(self, job: Leader, name: str, lost_at: str, then: Other | None) -> None:
        self.job, self.name, self.then = job, name, then
        self.lost_at = lost_at
        self.lost = False
        self.told: list[dict[str, Any]] = []
        self._never, self._ends = os.pipe()

    def fileno(self) -> int:
        return self._never

    def come(self) -> None:
        self.job._let_in(self)  # type: ignore[arg-type]
        here = {"kind": "here", "address": self.name, "port": 1, **Claim()._asdict()}
        self.job._heard(self, here)  # type: ignore[arg-type]

    def tell(self, kind: str, **fields: Any) -> None:
        self.told.append({"kind": kind, **fields})
        self.lost = kind == self.lost_at

    def say_alive(self) -> None:
        if self.told and self.told[-1]["kind"] == "begin" and not self.lost:
            life = self.told[-1]["life"]
            ended = {"kind": "ended", "life": life, "verdict": str(Verdict(0))}
            self.told.append({"kind": "says", "it": "has ended"})
            self.job._heard(self, ended)  # type: ignore[arg-type]

    def close(self) -> None:
        if self.then is not None:
            self.then.come()


class Memory:
    """Stands for this host's part in the copies of states: it gives back at once."""

    where = "a:1"

    def __init__(self) -> None:
        self.obeyed: list[dict[str, Any]] = []
        self._read, self._ends = os.pipe()

    def fileno(self) -> int:
        return self._read

    def obey(self, message: dict[str, Any]) -> None:
        self.obeyed.append(message)
        os.write(self._ends, b"n")

    def news(self) -> list[dict[str, Any]]:
        os.read(self._read, 1)
        return [{"kind": "gave", "life": self.obeyed[-1]["life"]}]


def test_a_host_that_is_lost_while_it_is_given_back_its_memory_is_replaced_by_the_next(
    signals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.01)
    monkeypatch.setattr(module, "END_SECONDS", 0.0)
    options = argparse.Namespace(
        nnodes=(2, 2),
        master=("127.0.0.1", 1),
        max_restart=1,
        grace=60.0,
        elastic_timeout=30.0,
        neighbour_every=3,
    )
    lives, memory = Lives(killed(4), Verdict(0)), Memory()
    job = Leader(options, lives, signals, None, memory)  # type: ignore[arg-type]
    last = Other(job, "d", "", None)
    third = Other(job, "c", "expect", last)
    second = Other(job, "b", "begin", third)
    second.come()
    assert job.run() == 0
    assert [message["kind"] for message in second.told] == ["begin"]
    # The first life is the first; the second one was to be with c.
    assert third.told[0] == {"kind": "expect", "life": 2, "nodes": 2, "node": 1}
    assert [message["to"] for message in memory.obeyed] == ["c:1", "d:1"]
    assert [message["kind"] for message in last.told[:2]] == ["expect", "begin"]
    first, then = lives.places
    assert last.told[1]["life"] == then.life == 3
    assert (first.neighbour, then.neighbour) == ("b:1", "d:1")
    assert last.told[1]["neighbour"] == "a:1"
    assert last.told[1]["mark"] == then.mark != first.mark


def test_a_host_that_stays_keeps_its_place_and_its_memory(
    signals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.01)
    options = argparse.Namespace(
        nnodes=(3, 3),
        master=("127.0.0.1", 1),
        max_restart=2,
        grace=60.0,
        elastic_timeout=30.0,
        neighbour_every=3,
    )
    lives, memory = Lives(killed(4), killed(9), Verdict(0)), Memory()
    job = Leader(options, lives, signals, None, memory)  # type: ignore[arg-type]
    others = [Other(job, name, "", None) for name in ("b", "c")]
    for other in others:
        other.come()
    assert job.run() == 0
    assert memory.obeyed == []
    for node, other in enumerate(others, 1):
        begun = [told for told in other.told if told["kind"] == "begin"]
        assert [(told["life"], told["node"]) for told in begun] == [(n, node) for n in (1, 2, 3)]
        assert {told["kind"] for told in other.told} == {"begin", "says", "over"}
