"""``fleetpipe launch``: what starts again, what it says, what signals do to it, and how it ends."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from fleetpipe.cli import main
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.job import attempt_files
from fleetpipe.launch.supervisor.attempts import POISONED, Attempt, KeptRanks, Verdict
from fleetpipe.launch.supervisor.pods import Order, Pods
from fleetpipe.launch.supervisor.supervisor import LocalRanks, Supervisor, catch_signals
from tests.fixtures import Capture, Launch, Patch
from tests.launch.supervisor.commands import launched

pytestmark = pytest.mark.no_paddle

#: What each rank does in each attempt stands in the script's arguments.
SCRIPT = """
    import os, pathlib, signal, sys, time
    from fleetpipe import fleet
    from fleetpipe.job import attempt_files
    from fleetpipe.job.job import all_ranks

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    write_begun = attempt_files.step_counter()
    if fleet.worker_index() == 0:
        attempt_files.tell_record(pathlib.Path(sys.argv[0]).with_name("record"))
    happens = dict(pair.split("=") for pair in sys.argv[1:])
    what = happens.get(f"{attempt_files.number()}.{fleet.worker_index()}")
    if what is not None:
        write_begun(int(what[1:]) + 1)
    all_ranks().all_gather(None)
    if what and what[0] == "p":
        # What Paddle's launcher was forked from.
        stat = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    if what and what[0] == "e":
        sys.exit()
    if what and what[0] == "k":
        os.kill(os.getpid(), signal.SIGKILL)
    if what and what[0] == "r":
        raise MemoryError(f"cannot allocate {what[1:]} GiB")
    time.sleep(60)
    """


def test_a_job_is_started_again_but_no_step_a_third_time(launcher: Launch, tmp_path: Path) -> None:
    happens = ["1.1=k4", "2.0=r9", "3.1=k9"]
    (tmp_path / "record").mkdir()
    told = launched(launcher, SCRIPT, "launch", arguments=happens, folder=tmp_path)
    first, second, third, *rest = told.said
    assert first.startswith(
        "fleetpipe: attempt 1 ended in step 4: rank 1 died (was ended by SIGKILL)"
    )
    assert second == "fleetpipe: attempt 2 begins: restart 1 of 3"
    assert third == (
        "fleetpipe: attempt 2 ended in step 9: rank 0 raised: MemoryError: cannot allocate 9 GiB"
    )
    # Rank 0 has shown its traceback itself.
    assert not any(line.startswith("    | ") for line in rest)
    assert rest[-4] == "fleetpipe: attempt 3 begins: restart 2 of 3"
    assert "attempt 3 ended in step 9: rank 1 died" in rest[-3]
    assert rest[-2:] == [
        "fleetpipe: step 9 failed twice in a row: it is not started again",
        "  what to do: look at the data of this step and at the error above; a job that is started "
        "anew goes on from its checkpoint",
    ]
    assert told.code == POISONED
    lines = (tmp_path / "record" / "lives.jsonl").read_text().splitlines()
    ends = [json.loads(line) for line in lines]
    assert [(end["life"], end["step"], end["saved"]) for end in ends] == [
        *((1, 4, None), (2, 9, None), (3, 9, None))
    ]
    assert all(end["code"] for end in ends)
    assert ends[0]["culprit"].startswith("rank 1 died (was ended by SIGKILL)")
    assert "MemoryError: cannot allocate 9 GiB" in ends[1]["details"]


def test_the_process_that_starts_ranks_may_die(launcher: Launch, tmp_path: Path) -> None:
    happens = ["1.0=p4", "2.0=e5", "2.1=e5"]
    (tmp_path / "record").mkdir()
    told = launched(launcher, SCRIPT, "launch", arguments=happens, folder=tmp_path)
    assert told.said == [
        "fleetpipe: attempt 1 ended: Paddle's launcher ended with 137",
        "fleetpipe: attempt 2 begins: restart 1 of 3",
    ]
    assert told.code == 0


def test_a_permanent_error_is_not_tried_again(launcher: Launch, tmp_path: Path) -> None:
    told = launched(launcher, "import nowhere_to_be_found", "launch", folder=tmp_path)
    assert (told.code, told.said[-1]) == (
        1,
        "fleetpipe: no restart mends this error: the job has failed",
    )
    assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'" in told.said[0]


def test_wrong_numbers_and_several_hosts_are_refused(tmp_path: Path, capsys: Capture) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    wrong = "--nproc_per_node=0", "--max_restart=-1", "--grace=soon", "--grace=-1"
    for option in (*wrong, *(f"--nnodes={nodes}" for nodes in ("0", "2:1", "2:", "many"))):
        assert main(["launch", option, str(script)]) == 2
    assert main(["launch", str(tmp_path / "missing.py")]) == 2
    capsys.readouterr()
    went = "--master=10.0.0.1:80", "--host=10.0.0.1", "--elastic_timeout=9", "--neighbour-every=3"
    for option in (*went, "--nnodes=2", "--nnodes=1:4"):
        assert main(["launch", option, str(script)]) == 2
        assert "give --ray ADDRESS" in capsys.readouterr().err


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
def test_a_signal_asks_and_ctrl_c_ends(
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


def test_fewer_ranks_may_take_their_time_to_end_or_fail(
    monkeypatch: Patch,
) -> None:
    died = Verdict(137, step=3, culprit="rank 1 died", suspect=1)
    full = Verdict(1, step=4, culprit="rank 0 raised: CheckpointError", raised=True)
    verdicts = [died, full, Verdict(0, 5), Verdict(0)]

    class Narrowed(Ranks):
        def start(self, attempt: Attempt) -> None:
            super().start(attempt)
            self.late = bool(attempt.positions.used)
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


def test_each_rank_gets_a_signal_once(tmp_path: Path, monkeypatch: Patch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *process: sent.append(process))
    pods = Mock()
    local = LocalRanks(argparse.Namespace(), tmp_path, pods, Mock())
    local.stop(signal.SIGTERM)
    for rank in range(2):
        attempt_files.note_start(tmp_path, rank, 100 + rank)
        local.stop_late(signal.SIGTERM)
    assert sent == [(100, signal.SIGTERM), (101, signal.SIGTERM)]
    pods.stop.assert_called_once_with()
    local.stop(signal.SIGUSR1)
    assert sent[2:] == [(100, signal.SIGUSR1), (101, signal.SIGUSR1)]


def test_no_attempt_starts_whose_logs_have_no_room(tmp_path: Path, monkeypatch: Patch) -> None:
    def full(_folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fleetpipe.arguments._write_into", full)
    options = argparse.Namespace(log_dir=str(tmp_path / "log"))
    with pytest.raises(ConfigError, match=r"--log-dir: cannot use (?s:.*)No space left"):
        LocalRanks(options, tmp_path, Mock(), Mock()).start(Attempt(2))


@pytest.mark.parametrize("saved", [None, 8])
def test_what_ctrl_c_ended_is_recorded_so(capsys: Capture, saved: int | None) -> None:
    ranks = Ranks(Verdict(0 if saved else 137, saved, culprit="rank 0 was ended"))
    assert supervise(ranks, signal.SIGINT) == 130
    *_, last = capsys.readouterr().err.splitlines()
    more = ", the job saved 8 steps: the same command goes on from there"
    assert last == f"fleetpipe: interrupted{more if saved else ''}"
    assert ranks.recorded == [(1, Verdict(130, saved, culprit="interrupted"))]


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("paddle", "code", "got"),
    [
        ("raise ModuleNotFoundError('No module named paddle')", 1, "No module named paddle"),
        ("raise OSError('first line\\n  a second one')", 1, "first line\n  a second one\n"),
        (KILLED, 137, "not a word of why"),
    ],
)
def test_a_failed_start_is_one_error(
    tmp_path: Path, capfd: Capture, paddle: str, code: int, got: str
) -> None:
    (tmp_path / "paddle.py").write_text(paddle)
    pods = Pods({**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path)
    pods.start(Order([], {}))
    with pytest.raises(UsageError, match=f"cannot be loaded: .* ended with {code}") as raised:
        pods.code()
    pods.close()
    assert got in str(raised.value)
    assert capfd.readouterr().err == ""
