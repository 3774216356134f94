"""Forked ranks: as fresh as started ones, seen to their end, and none of them left behind."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import forking
from tests.fixtures import Launch, Patch
from tests.harness.test_launching import end
from tests.launching import ROOT, JobFailed

pytestmark = pytest.mark.once

pytest.importorskip("paddle")


def test_a_child_begins_as_a_process_does(launch: Launch) -> None:
    source = """
        import os, sys, threading
        print(os.getcwd(), sys.stdin.read(), threading.active_count())
        print(os.getsid(0) == os.getpid())
    """
    for log in launch(source, 2, cwd=ROOT).logs:
        assert log.splitlines() == [f"{ROOT}  1", "True"]


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


def test_the_answer_to_an_interrupted_question_is_not_another_ones(
    launch: Launch, monkeypatch: Patch
) -> None:
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
