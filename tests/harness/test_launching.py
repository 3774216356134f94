"""What tests are run with: launched and forked jobs that leave nothing behind, and ``--rows``."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests import forking, launching
from tests.conftest import rows_left_out
from tests.fixtures import Launch, Patch
from tests.launching import ROOT, JobFailed, JobHung, JobLeftProcesses

pytestmark = pytest.mark.once
_needs_paddle = pytest.mark.skipif(
    importlib.util.find_spec("paddle") is None, reason="ranks are forked behind an import of Paddle"
)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def end(pids: list[int], limit: float = 10.0) -> bool:
    """Tells whether processes end in a while: a killed one may be on its way."""
    deadline = time.monotonic() + limit
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch: Patch) -> None:
    monkeypatch.setattr(launching, "GRACE_SECONDS", 1.0)


@pytest.fixture(params=["launch", "launcher"])
def either(request: pytest.FixtureRequest) -> Launch:
    """Forks the ranks, or starts them by Paddle's launcher."""
    pytest.importorskip("paddle")
    run: Launch = request.getfixturevalue(request.param)
    return run


def test_each_rank_has_its_log_and_its_environment(either: Launch, tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    script = tmp_path / "script.py"
    source = """
        import os, sys, beside
        print("rank", os.environ["PADDLE_TRAINER_ID"], "of", os.environ["PADDLE_TRAINERS_NUM"])
        print(sys.argv[1:], os.environ["EXTRA"], os.environ["OMP_NUM_THREADS"], __name__)
        print("to the error stream", file=sys.stderr)
        sys.exit(7 if os.environ["PADDLE_TRAINER_ID"] == "1" else 0)
        """
    script.write_text(textwrap.dedent(source))
    job = either(script, 2, args=["--steps", "3"], env={"EXTRA": "yes"}, check=False)
    assert job.returncode == 7
    for rank, log in enumerate(job.logs):
        assert f"rank {rank} of 2" in log
        assert "['--steps', '3'] yes 1 __main__" in log
        assert "to the error stream" in log


def test_a_hang_shows_every_ranks_stack_and_leaves_no_process(either: Launch) -> None:
    source = """
        import os, subprocess, threading, time

        def waits_for_ever():
            print("pid", os.getpid(), subprocess.Popen(["sleep", "600"]).pid, os.fork(), flush=True)
            time.sleep(600)

        def also_waits():
            time.sleep(600)

        threading.Thread(target=also_waits, daemon=True).start()
        waits_for_ever()
    """
    start = time.monotonic()
    with pytest.raises(JobHung) as caught:
        either(source, 2, timeout=10)
    assert time.monotonic() - start < 300  # half of what its processes sleep
    text = str(caught.value)
    first, second = text.split("--- rank 1")
    for log in (first, second):
        assert "in waits_for_ever" in log
        assert "in also_waits" in log
    pids = [int(word) for line in text.splitlines() if "pid " in line for word in line.split()[1:]]
    assert len(set(pids)) >= 6
    assert end([pid for pid in pids if pid])


def test_a_stopped_process_is_killed_too(launcher: Launch) -> None:
    source = f"import os; print('pid', os.getpid()); os.kill(os.getpid(), {int(signal.SIGSTOP)})"
    with pytest.raises(JobHung) as caught:
        launcher(source, None, timeout=1)
    assert end([int(str(caught.value).split("pid ")[1].split()[0])])


def test_a_process_that_outlives_its_job_is_reported_and_killed(either: Launch) -> None:
    source = """
        import subprocess
        print("child", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    """
    with pytest.raises(JobLeftProcesses, match="sleep 600") as caught:
        either(source, None)
    assert end([int(str(caught.value).split(":")[1].split()[0])])


def test_the_parents_job_is_not_inherited(launcher: Launch, monkeypatch: Patch) -> None:
    for name in ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"):
        monkeypatch.setenv(name, "5")
    job = launcher("import os; print([name for name in os.environ if 'TRAINER' in name])", None)
    assert job.logs == ("[]",)
    assert os.environ["PADDLE_TRAINER_ID"] == "5"


@_needs_paddle
def test_a_child_begins_as_a_process_does(launch: Launch) -> None:
    source = """
        import os, sys, threading
        print(os.getcwd(), sys.stdin.read(), threading.active_count())
        print(os.getsid(0) == os.getpid())
    """
    for log in launch(source, 2, cwd=ROOT).logs:
        assert log.splitlines() == [f"{ROOT}  1", "True"]


@_needs_paddle
def test_a_fork_waits_for_a_thread_that_runs() -> None:
    # More than a second's work, without the interpreter's lock.
    work = functools.partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 3_000_000)
    thread = threading.Thread(target=work)
    thread.start()
    began = time.monotonic()
    forking._let_threads_fall_asleep(0.1)
    assert time.monotonic() - began >= 0.1
    forking._let_threads_fall_asleep(60)
    assert 0.2 < time.monotonic() - began < 60
    thread.join()


@_needs_paddle
def test_a_child_has_nothing_of_another_ones(launch: Launch) -> None:
    source = """
        import builtins, os, tempfile
        import numpy as np, paddle
        assert not hasattr(builtins, "left") and "LEFT" not in os.environ
        builtins.left = os.environ["LEFT"] = "something"
        paddle.enable_static()
        print(np.random.rand(), paddle.get_rng_state()[0].current_seed(), tempfile.mktemp())
    """
    logs = [*launch(source, 2).logs, *launch(source, None).logs]
    drawn = [log.splitlines()[-1].split() for log in logs]
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn))


@_needs_paddle
@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("pass", 0, "left by atexit"),
        ("sys.exit(7)", 7, "left by atexit"),
        ("raise ValueError('no good')", 1, "ValueError: no good\nleft by atexit"),
        ("os._exit(3)", 3, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_child_ends_as_a_process_does(launch: Launch, end: str, code: int, told: str) -> None:
    source = f"import atexit, os, sys; atexit.register(print, 'left by atexit')\n{end}"
    job = launch(source, None, check=False)
    assert job.returncode == code
    assert job.logs[0].endswith(told)
    if code:
        with pytest.raises(JobFailed, match=f"exit code {code}"):
            launch(source, None)


@_needs_paddle
def test_an_interrupted_question_gets_no_later_answer(launch: Launch, monkeypatch: Patch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    launch("", None)
    with monkeypatch.context() as patch:
        patch.setattr(forking._mother().stdout, "readline", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch("import time; time.sleep(600)", None)
    # That mother was killed, and is replaced.
    assert launch("print('here')", None).logs == ("here",)


ABANDONED = """
import os, sys
from pathlib import Path
from tests.forking import Forked
folder = Path(sys.argv[1])
(folder / "sleeps.py").write_text("import time; time.sleep(600)")
options = {"mark": "1" * 32, "env": {}, "cwd": folder, "log": folder / "log"}
child = Forked(folder / "sleeps.py", [], **options)
print(child._mother.pid, child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@_needs_paddle
@pytest.mark.processes
def test_nothing_is_left_where_the_tests_are_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [sys.executable, "-c", ABANDONED, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) == 2
    assert end(pids)


class Item:
    """A test as pytest collects it, by its name and its markers."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid, self.markers = nodeid, markers

    def get_closest_marker(self, name: str) -> object:
        """The marker of a name, or None."""
        return name if name in self.markers else None


def test_the_first_the_last_and_rows_between_stay() -> None:
    table = [Item(f"tests/a.py::test_one[{n}-x]") for n in range(9)]
    others = [Item("tests/a.py::test_two"), *(Item(f"tests/a.py::test_three[{n}]") for n in "ab")]
    every = [Item(f"tests/b.py::test_names[{n}]", "every_row") for n in range(5)]
    once = [Item(f"tests/a.py::test_one[{n}-y]", "once") for n in range(4)]
    items: list[Any] = [*table, *others, *every, *once]
    left = rows_left_out(items, 3)
    assert [item for item in items if item not in left] == [
        table[0],
        table[4],
        table[8],
        *others,
        *every,
        once[0],
        once[2],
        once[3],
    ]
    assert len(rows_left_out(items, 1)) == 8 + 1 + 3
