"""Starts the ranks of a job one by one, as a scheduler without Paddle's launcher would.

Each rank's exit code and the moment of its end are seen at first hand, a rank can be left out, and
signals reach one of them alone. The ranks carry the mark of :mod:`tests.launching`, by which all
of their processes are found, killed and missed.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests import launching
from tests.namespaces import Host

POLL_SECONDS = 0.005


class Ended(NamedTuple):
    """The end of one rank: its exit code, when (``time.monotonic()``), and what it wrote."""

    code: int
    at: float
    log: str


class Ranks:
    """The running processes of a job, by rank."""

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]], home: Path) -> None:
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
                time.sleep(1)
                raise launching.JobHung(f"ranks {waiting} run for {limit:g} s\n{self._logs()}")
            time.sleep(POLL_SECONDS)
        return dict(sorted(ended.items()))

    def _logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n{self.log(rank)}" for rank in self._processes)


@contextmanager
def started(
    script: Path,
    ranks: int,
    *args: str,
    folder: Path,
    only: Sequence[int] | None = None,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    hosts: Sequence[Host] = (),
) -> Iterator[Ranks]:
    """Starts a script on ``ranks`` ranks, whose working directory is ``Ranks.home``.

    Args:
        script: What each rank runs.
        ranks: Ranks of the job.
        args: Arguments of the script.
        folder: Where ``home`` is made.
        only: The ranks to start; by default all.
        env: Additions to the environment.
        port: Port of rank 0's endpoint; by default a free one.
        hosts: The host of each rank; by default all are on this one.

    Raises:
        JobLeftProcesses: At the end some process of the job is still there; it has been killed.
    """
    mark = uuid.uuid4().hex
    home = folder / mark
    home.mkdir()
    ports = _free_ports(ranks)
    ports[0] = port or ports[0]
    addresses = [host.address for host in hosts] or ["127.0.0.1"] * ranks
    endpoints = [f"{address}:{number}" for address, number in zip(addresses, ports)]
    base = {
        **launching._environment(mark, env or {}),
        "PADDLE_TRAINERS_NUM": str(ranks),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    python = [sys.executable, "-u", launching.__file__]
    processes = {
        rank: _start(
            [*(hosts[rank].command() if hosts else ()), *python, str(script), *args],
            home,
            rank,
            {**base, "PADDLE_CURRENT_ENDPOINT": endpoints[rank]},
        )
        for rank in (range(ranks) if only is None else only)
    }
    try:
        yield Ranks(processes, home)
        left = launching._wait_until_gone(mark)
    finally:
        launching._kill(mark)
        for process in processes.values():
            process.wait()
    if left:
        raise launching.JobLeftProcesses("\n".join(["outlived their job:", *left]))


def _start(
    command: Sequence[str], home: Path, rank: int, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with (home / f"rank{rank}.log").open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=home,
            env={**env, "PADDLE_TRAINER_ID": str(rank), "PADDLE_RANK_IN_NODE": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.Random(os.urandom(8)).sample(range(20000, 32000), 200):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def kill_now() -> None:
    """Ends this process as the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
