"""Starts the ranks of a job one by one, as a scheduler without Paddle's launcher would.

The ranks are forked (:mod:`tests.forking`), which takes milliseconds. Each rank's exit code and the
moment of its end are seen at first hand, a rank can be left out, and signals reach one of them
alone. The ranks carry the mark of :mod:`tests.launching`, by which all of their processes are
found, killed and missed.
"""

from __future__ import annotations

import atexit
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests import launching
from tests.fixtures import Call
from tests.forking import Forked

POLL_SECONDS = 0.005
#: What happens at once has happened within so many seconds on a machine that others load, too;
#: Gloo's own waits end after 30, and those of a job after 60.
PROMPT = 20.0
#: The ports of a worker of xdist are its own.
WORKERS = 8
OWN = int((os.environ.get("PYTEST_XDIST_WORKER") or "gw0")[2:]) % WORKERS


class Ended(NamedTuple):
    """The end of one rank: its exit code, when (``time.monotonic()``), and what it wrote."""

    code: int
    at: float
    log: str


#: Both are used alike.
Process = Forked | subprocess.Popen[bytes]


class Ranks:
    """The running processes of a job, by rank."""

    def __init__(self, processes: Mapping[int, Process], home: Path) -> None:
        self.home = home
        self._processes = processes

    def log(self, rank: int) -> str:
        """What a rank has written so far."""
        return launching._read(self.home / f"rank{rank}.log")

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank's process."""
        self._processes[rank].send_signal(number)

    def moment(self, name: str) -> float:
        """The moment (``time.monotonic()``) that a rank wrote into the file ``name``."""
        return float((self.home / name).read_text())

    def wait_for(self, name: str, limit: float = 60.0) -> float:
        """Waits until a rank has written the file ``name``; returns the moment it holds."""
        path = self.home / name
        deadline = time.monotonic() + limit
        while not (path.exists() and path.read_text().endswith("\n")):
            ended = all(process.poll() is not None for process in self._processes.values())
            if ended or time.monotonic() > deadline:
                raise launching.JobHung(f"{name} did not come\n{self._logs()}")
            time.sleep(POLL_SECONDS)
        return self.moment(name)

    def wait(self, ranks: Iterable[int] | None = None, limit: float = 60.0) -> dict[int, Ended]:
        """Waits until ``ranks``, by default all, have ended."""
        waiting = set(self._processes if ranks is None else ranks)
        deadline = time.monotonic() + limit
        ended = {}
        while waiting:
            for rank in list(waiting):
                code = self._processes[rank].poll()
                if code is not None:
                    ended[rank] = Ended(code, time.monotonic(), self.log(rank))
                    waiting.discard(rank)
            if time.monotonic() > deadline:
                for rank in waiting:
                    self.signal(rank, launching.STACKS_SIGNAL)
                time.sleep(1)  # until the stacks stand in the logs
                raise launching.JobHung(f"ranks {waiting} run for {limit:g} s\n{self._logs()}")
            time.sleep(POLL_SECONDS)
        return dict(sorted(ended.items()))

    def _logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in self._processes)


@contextmanager
def started(
    script: Path | str,
    ranks: int | None,
    *args: str,
    folder: Path,
    only: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    cwd: Path | None = None,
) -> Iterator[Ranks]:
    """Starts a script on ``ranks`` ranks.

    Args:
        script: What each rank runs: a file, or source code.
        ranks: Ranks of the job; None starts one process that knows of no job.
        args: Arguments of the script.
        folder: Where ``Ranks.home`` is made.
        only: The ranks to start; by default all.
        env: Additions to the environment.
        port: Port of rank 0's endpoint; by default a free one.
        cwd: Working directory of the ranks; by default ``Ranks.home``.

    Raises:
        JobLeftProcesses: At the end some process of the job is still there; it has been killed.
    """
    mark = uuid.uuid4().hex
    home = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
    file = launching.script_file(script, home)
    processes: dict[int, Forked] = {}
    left = []
    try:
        for rank, own in _environments(ranks, port).items():
            if only is None or rank in only:
                log = home / f"rank{rank}.log"
                own.update(env or {})
                processes[rank] = Forked(file, args, mark=mark, env=own, cwd=cwd or home, log=log)
        yield Ranks(processes, home)
        left = launching._wait_until_gone(mark)
    finally:
        launching._kill(mark)
        for process in processes.values():
            process.wait()
    if left:
        raise launching.JobLeftProcesses("\n".join(["outlived their job:", *left]))


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
) -> launching.Finished:
    """Does what :func:`tests.launching.run` does without the launcher, several times as fast.

    Paddle is imported when the script begins, and nobody ends a rank because another one failed.
    """
    start = time.monotonic()
    # As the launcher says it: where functions of Paddle that open a store of their own meet.
    env = {"PADDLE_MASTER": f"127.0.0.1:{_free_ports(1)[0]}", **(env or {})} if nproc else env
    with started(script, nproc, *args, folder=folder, env=env, cwd=cwd) as ranks:
        ended = ranks.wait(limit=timeout)
    failed = [end for end in ended.values() if end.code]
    job = launching.Finished(
        min(failed, key=lambda end: end.at).code if failed else 0,
        tuple(end.log for end in ended.values()),
        "",
        time.monotonic() - start,
    )
    if check and failed:
        raise launching.JobFailed(job)
    return job


def call(function: Call, ranks: int | None, *args: Any, folder: Path, **options: Any) -> list[Any]:
    """Calls a function of these tests on every rank of a job; returns what each call returned.

    Args:
        function: It and what goes in and out are pickled: it has a name in a module.
        ranks: Ranks of the job; None for one process that knows of no job.
        args: Its arguments.
        folder: As that of `run`.
        options: Those of `run`. Without ``check``, the result of a rank that failed is None.
    """
    home = Path(tempfile.mkdtemp(prefix="call-", dir=folder))
    (home / "call").write_bytes(pickle.dumps((function, args)))
    script = f"from tests import byhand\n\nbyhand.answer({str(home)!r})\n"
    run(script, ranks, folder=folder, **options)
    files = [home / str(rank) for rank in range(ranks or 1)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def answer(home: str) -> NoReturn:
    """What a rank of `call` runs.

    It ends behind its threads and the handlers of an exit. What Python takes down after these costs
    half a second of a core for each rank, and is left to the tests that launch scripts.
    """
    function, args = pickle.loads(Path(home, "call").read_bytes())
    result = pickle.dumps(function(*args))
    Path(home, os.environ.get("PADDLE_TRAINER_ID", "0")).write_bytes(result)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _environments(ranks: int | None, port: int | None) -> dict[int, dict[str, str]]:
    """What a launcher would tell each rank."""
    if ranks is None:
        return {0: {}}
    ports = _free_ports(ranks)
    ports[0] = port or ports[0]
    endpoints = [f"127.0.0.1:{number}" for number in ports]
    return {
        rank: {
            "PADDLE_TRAINERS_NUM": str(ranks),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
        }
        for rank in range(ranks)
    }


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.Random(os.urandom(8)).sample(launching.PORTS[OWN::WORKERS], 200):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def kill_now() -> None:
    """Ends this process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
