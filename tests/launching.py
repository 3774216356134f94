"""Runs a script on several processes as a user would, within a time limit, and leaves none behind.

`run` starts ``paddle.distributed.launch`` (or, for one process, Python alone) in a session of its
own. Every process of the job carries a mark in its environment: by it the job is found in /proc,
because the launcher gives each worker a session too. When the limit is reached, each rank prints
the stacks of its threads before it is killed.

The workers are started through this very file (see `_enter`), which registers the signal that
prints the stacks: Paddle takes SIGABRT, which PYTHONFAULTHANDLER would have used, for itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "FLEETPIPE_TEST_JOB"
STACKS_SIGNAL = signal.SIGUSR1
STACKS_HEADER = "most recent call first"
ESCAPE_CODES = re.compile(r"\x1b\[[0-9;]*m")
#: Where jobs look for free ports: fleetpipe takes those of 20000 to 32000 for its stores, and the
#: system those of 32768 to 60999 for connections, so that nothing takes one of these between the
#: look and the use.
PORTS = range(61000, 65500)
GRACE_SECONDS = 3.0
POLL_SECONDS = 0.05


class JobFailed(AssertionError):
    """The job's exit code was not 0; ``job`` is what it left, where it is of one host."""

    def __init__(self, job: Finished | str) -> None:
        super().__init__(str(job))
        self.job = job


class JobHung(AssertionError):
    """The job reached its time limit; the message holds every rank's log, stacks at the end."""


class JobLeftProcesses(AssertionError):
    """The job ended, but some of its processes did not; they have been killed."""


@dataclass(frozen=True)
class Finished:
    """A job that ended by itself.

    Attributes:
        returncode: The launcher's exit code: that of the first rank that failed, else 0.
        logs: What each rank wrote, standard output and error together.
        launcher: What the launcher wrote; it repeats rank 0's log, and the end of a failed one.
        seconds: How long the job took.
    """

    returncode: int
    logs: tuple[str, ...]
    launcher: str
    seconds: float

    def __str__(self) -> str:
        head = f"exit code {self.returncode} after {self.seconds:.1f} s"
        return "\n".join([head, _show(self.logs), "--- launcher", self.launcher])


def run(
    script: Path | str,
    nproc: int | None,
    *,
    folder: Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    cwd: Path | None = None,
    check: bool = True,
) -> Finished:
    """Runs a script on ``nproc`` ranks and waits for it.

    Args:
        script: A file (`Path`), or source code (`str`, any indentation).
        nproc: Number of ranks under the launcher; None starts one process without the launcher.
        folder: Where logs go; each call makes a folder of its own there.
        args: Arguments of the script.
        env: Additions to the environment.
        timeout: Limit in seconds.
        cwd: Working directory of the job; by default the folder made for it.
        check: Whether an exit code other than 0 is an error.

    Raises:
        JobFailed: The exit code is not 0 and ``check`` is set.
        JobHung: The limit was reached.
        JobLeftProcesses: A process of the job outlived it.
    """
    home = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
    mark = uuid.uuid4().hex
    command = [*_python(nproc, home), __file__, str(script_file(script, home)), *args]
    start = time.monotonic()
    with (home / "output.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd or home,
            env=_environment(mark, env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        returncode = process.wait(timeout)
        left = _wait_until_gone(mark)
    except subprocess.TimeoutExpired:
        _print_stacks(mark, None if nproc is None else process.pid, home, nproc)
        message = f"still running after {timeout:g} s\n{_show(_logs(home, nproc))}"
        raise JobHung(message) from None
    finally:
        _kill(mark)
        process.wait()
    job = Finished(
        returncode, _logs(home, nproc), _read(home / "output.log"), time.monotonic() - start
    )
    if left:
        raise JobLeftProcesses("\n".join(["outlived their job:", *left, str(job)]))
    if check and returncode != 0:
        raise JobFailed(job)
    return job


def command(
    *words: object, cwd: Path | str = ROOT, timeout: float = 120.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command, which imports this tree's packages, to its end."""
    return subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def script_file(script: Path | str, home: Path) -> Path:
    """The file of a script; source code is written to one in ``home``."""
    if isinstance(script, Path):
        return script.resolve()
    file = home / "script.py"
    file.write_text(textwrap.dedent(script))
    return file


def _python(nproc: int | None, home: Path) -> list[str]:
    if nproc is None:
        return [sys.executable, "-u"]
    launcher = [sys.executable, "-m", "paddle.distributed.launch"]
    return [*launcher, "--nproc_per_node", str(nproc), "--log_dir", str(home / "log")]


def _environment(mark: str, extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if "PADDLE_" not in name}
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONFAULTHANDLER": "1",
        "PORT_RANGE": f"{PORTS[0]}:{PORTS[-1]}",
        **extra,
        MARK: mark,
    }


def _show(logs: Sequence[str]) -> str:
    return "\n".join(f"--- rank {rank}\n{log}" for rank, log in enumerate(logs))


def _logs(home: Path, nproc: int | None) -> tuple[str, ...]:
    if nproc is None:
        return (_read(home / "output.log"),)
    return tuple(_read(home / "log" / f"workerlog.{rank}") for rank in range(nproc))


def _read(path: Path) -> str:
    if not path.exists():
        return ""
    return ESCAPE_CODES.sub("", path.read_text(errors="replace")).strip()


def processes(mark: str) -> dict[int, str]:
    """Finds the living processes of a job: their numbers and command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        # Processes end while they are looked at, and others belong to other users.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace").strip()
    return found


def _wait_until_gone(mark: str) -> list[str]:
    """Waits a moment for the job's last processes; returns those that stay."""
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        left = processes(mark)
        if not left or time.monotonic() > deadline:
            return [f"{pid}: {command}" for pid, command in left.items()]
        time.sleep(POLL_SECONDS)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _print_stacks(mark: str, launcher: int | None, home: Path, nproc: int | None) -> None:
    """Has every rank write its stacks to its log; a rank that cannot is not waited for long."""
    _signal([pid for pid in processes(mark) if pid != launcher], STACKS_SIGNAL)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if all(STACKS_HEADER in log for log in _logs(home, nproc)):
            return


def _kill(mark: str) -> None:
    """Kills the job's processes, and those that they start meanwhile."""
    while pids := list(processes(mark)):
        _signal(pids, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _enter() -> None:
    """Runs the script named by the first argument, after registering the signal for stacks."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _enter()
