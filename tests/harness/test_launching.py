"""The helpers that run jobs: exit codes, logs, stacks on a hang, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.fixtures import Launch, Patch
from tests.launching import JobFailed, JobHung, JobLeftProcesses

pytestmark = pytest.mark.once


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


@pytest.fixture(params=["launch", "launcher"])
def either(request: pytest.FixtureRequest) -> Launch:
    """Forks the ranks, or starts them by Paddle's launcher."""
    pytest.importorskip("paddle")
    run: Launch = request.getfixturevalue(request.param)
    return run


def test_each_rank_has_its_log_its_arguments_and_its_environment(either: Launch) -> None:
    job = either(
        """
        import os, sys
        print("rank", os.environ["PADDLE_TRAINER_ID"], "of", os.environ["PADDLE_TRAINERS_NUM"])
        print(sys.argv[1:], os.environ["EXTRA"], os.environ["OMP_NUM_THREADS"], __name__)
        print("to the error stream", file=sys.stderr)
        """,
        2,
        args=["--steps", "3"],
        env={"EXTRA": "yes"},
    )
    assert job.returncode == 0
    for rank, log in enumerate(job.logs):
        assert f"rank {rank} of 2" in log
        assert "['--steps', '3'] yes 1 __main__" in log
        assert "to the error stream" in log


def test_exit_code_of_the_failed_rank_is_the_jobs(launcher: Launch) -> None:
    pytest.importorskip("paddle")
    source = """
        import os, sys
        sys.exit(7 if os.environ["PADDLE_TRAINER_ID"] == "1" else 0)
    """
    assert launcher(source, 2, check=False).returncode == 7


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


def test_one_process_needs_no_launcher(launcher: Launch) -> None:
    job = launcher("import os; print('world', os.environ.get('PADDLE_TRAINERS_NUM'))", None)
    assert job.logs == ("world None",)


def test_a_failure_shows_the_traceback(launcher: Launch) -> None:
    with pytest.raises(JobFailed, match="ZeroDivisionError"):
        launcher("1 / 0", None)


def test_helpers_stand_beside_the_script(launcher: Launch, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    (tmp_path / "main.py").write_text("import beside; print(beside.WORD)")
    assert launcher(tmp_path / "main.py", None).logs == ("found",)


def test_the_parents_job_is_not_inherited(launcher: Launch, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "5")
    job = launcher("import os; print(os.environ.get('PADDLE_TRAINER_ID'))", None)
    assert job.logs == ("None",)
    assert os.environ["PADDLE_TRAINER_ID"] == "5"
