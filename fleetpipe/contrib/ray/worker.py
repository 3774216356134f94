"""The train loop of a launched job's workers: each runs a rank's script in a process of its own.

A script needs its own process: signals reach only the main thread of one, and Ray runs train loops
in others. A group of workers outlives an attempt, so that a rank that fails costs no new workers,
and what it kept in memory is there for the next attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import ray
import ray.train

from fleetpipe import systems
from fleetpipe.contrib.ray.backend import free_ports, own_place
from fleetpipe.contrib.ray.mailbox import WorkerOrder, WorkerReport
from fleetpipe.job import attempt_files
from fleetpipe.launch.script import LAUNCHED
from fleetpipe.launch.supervisor.state_folder import state_folder

_KEEPER = Path(__file__).with_name("keeper.py")
_LOOK_SECONDS = 0.1
#: Ports that a worker offers: one for its rank, one for Paddle's store, others where two are alike.
_PORTS = 4


@dataclasses.dataclass(frozen=True)
class WorkerAttempt:
    """What the workers start.

    Attributes:
        number: Of the attempt.
        words: Those behind ``fleetpipe``, with the script and its arguments.
        folder: Where the script runs, if the node has it.
        logs: The folder of the ranks' logs.
        environment: What the driver has set for the ranks; None: it is not set.
        beside: What it has set otherwise, for a node that has set nothing else.
        ranks: What each rank's environment says of the job, by rank.
        kept: The folder in which each rank keeps the state of every step; none: they keep none.
    """

    number: int
    words: list[str]
    folder: str
    logs: str
    environment: Mapping[str, str | None]
    beside: Mapping[str, str]
    ranks: list[dict[str, str]]
    kept: list[str]


def serve(config: Mapping[str, Any]) -> None:
    """Runs one attempt after another of this worker's rank, until it is to leave.

    Args:
        config: ``mailbox``, and the number of the ``group``.
    """
    worker = _Worker(config["mailbox"], config["group"])
    with state_folder() as folder, keeper_process(folder) as keeper:
        worker.serve(folder, keeper)


class _Worker:
    """One worker of a group."""

    def __init__(self, mailbox: Any, group: int) -> None:
        self._mailbox = mailbox
        self._group = group
        self._rank: int = ray.train.get_context().get_world_rank()
        self._fetched = 0
        self._next_order: Any = None
        self._orders: deque[WorkerOrder] = deque()
        self._step: int | None = None

    def serve(self, folder: Path, keeper: _Keeper) -> None:
        self._report("ready", (own_place(), free_ports(_PORTS)))
        while (order := self._next(None)) is None or order.kind != "leave":
            if order is not None and order.kind == "begin":
                self._run(order.value, folder, keeper)
                self._report("ready", (own_place(), free_ports(_PORTS)))

    def _run(self, attempt: WorkerAttempt, folder: Path, keeper: _Keeper) -> None:
        home = folder / f"attempt-{attempt.number}"
        home.mkdir()
        log = Path(attempt.logs) / f"workerlog.{self._rank}"
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("a+b")
        kept = {"FLEETPIPE_KEPT_STATE": attempt.kept[self._rank]} if attempt.kept else {}
        variables = {
            attempt_files.FOLDER: str(home),
            attempt_files.NUMBER: str(attempt.number),
            **kept,
        }
        here = {**attempt.beside, **os.environ, **attempt.environment}
        environment = {**here, **attempt.ranks[self._rank], **variables}
        keeper.start(
            command=[sys.executable, "-u", str(LAUNCHED), *attempt.words],
            environment={name: value for name, value in environment.items() if value is not None},
            folder=attempt.folder,
            log=str(log),
        )
        self._step = None
        with output:
            while (code := keeper.code(_LOOK_SECONDS)) is None:
                if (order := self._next(0)) is not None:
                    if order.kind == "leave":
                        self._orders.appendleft(order)
                        return
                    keeper.signal(order.value)
                self._tell(home, output.read())
            self._tell(home, output.read())
        files = {file.name: file.read_bytes() for file in home.iterdir() if file.is_file()}
        self._report("ended", (code, files))

    def _tell(self, home: Path, output: bytes) -> None:
        """Tells, on the first rank, what that says, and which step it has begun."""
        if self._rank == 0:
            if output:
                self._report("output", output)
            step = attempt_files.steps_begun(home).get(0)
            if step != self._step:
                self._step = step
                self._report("step", (step, attempt_files.replica(home, 0)))

    def _report(self, kind: str, value: Any) -> None:
        self._mailbox.report.remote(WorkerReport(self._group, self._rank, kind, value))

    def _next(self, seconds: float | None) -> WorkerOrder | None:
        """Returns the next order; None where there is none within the time."""
        if not self._orders:
            if self._next_order is None:
                self._next_order = self._mailbox.orders.remote(self._group, self._fetched)
            if ray.wait([self._next_order], timeout=seconds)[0]:
                self._orders.extend(ray.get(self._next_order))
                self._next_order, self._fetched = None, self._fetched + len(self._orders)
        return self._orders.popleft() if self._orders else None


class _Keeper:
    """The process that starts the rank's, and ends it with this one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._orders = cast("IO[bytes]", process.stdin)
        self._answers = cast("IO[bytes]", process.stdout)
        self._session = 0

    def start(self, **script: Any) -> None:
        self._orders.write(json.dumps(script).encode() + b"\n")
        self._session = self._answer()["process"]

    def code(self, seconds: float) -> int | None:
        """Returns the exit code of the script; None where it runs for so many seconds more."""
        if not select.select([self._answers], [], [], seconds)[0]:
            return None
        return self._answer()["code"]

    def signal(self, number: int) -> None:
        """Sends a signal to the rank's process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._session, number)

    def _answer(self) -> dict[str, int]:
        line = self._answers.readline()
        if not line:
            if self._session:
                systems.end_session(self._session)
            return {"code": -systems.SIGKILL, "process": 0}
        answer: dict[str, int] = json.loads(line)
        return answer


@contextlib.contextmanager
def keeper_process(folder: Path) -> Iterator[_Keeper]:
    """Within it there is a process that removes a folder when this one is gone."""
    # Nothing of this process's environment or packages: it is up in some milliseconds.
    command = [sys.executable, "-I", "-S", str(_KEEPER), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, bufsize=0, stdin=pipe, stdout=pipe, start_new_session=True
    ) as process:
        yield _Keeper(process)
