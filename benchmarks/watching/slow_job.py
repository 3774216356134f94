"""A job of which one rank after another is slow for a while: what its ranks run.

Every rank waits a little for its data, for each message and for its save, as in a real job; where
it is to be slow, that takes more. All of it follows one list that every rank makes alike.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.figures import started, wrapped

KINDS = ("compute", "processor", "data", "link", "save")
#: Seconds that a step waits for data, a message for the network, and a save for its disk.
DATA, LATENCY, SAVE = 0.004, 0.002, 0.003
#: Steps before the first injection, of one, and from its end to the next.
LEARNED, INJECTED, RECOVERY = 60, 14, 18
MICRO_BATCHES, ROWS, HIDDEN = 4, 24, 384
_GROUPS = Path("/sys/fs/cgroup/cpu")
#: Microseconds in which a container may use its quota, as the kernel has it by default.
_PERIOD = 100_000


class Injection(NamedTuple):
    """A rank that is slow from a step on; ``link`` is that to the rank behind it.

    The factor is that of the rank's computation, data or saving. A link and a limit have the one
    that makes a step so many times as long.
    """

    kind: str
    factor: float
    rank: int
    first: int


def injections(ranks: int, replicas: int, counts: dict[float, int]) -> list[Injection]:
    """Returns what happens in a job, with so many injections of each factor and kind."""
    chosen: list[Injection] = []
    for factor, count in counts.items():
        for number in range(count):
            for kind in KINDS:
                # The last rank of a pipeline has no link to one behind it.
                stages = ranks // replicas
                rank = number % (stages - 1 if kind == "link" else ranks)
                first = LEARNED + len(chosen) * (INJECTED + RECOVERY)
                chosen.append(Injection(kind, factor, rank, first))
    return chosen


class Slowness:
    """What makes this rank slow in its steps."""

    def __init__(self, rank: int, job: Any) -> None:
        """Slows nothing yet; its links are as slow as all are."""
        self.extra = 0.0
        self.data, self.save = DATA, SAVE
        self._job = job
        ranks = job.pipeline_ranks()
        # Forwards that are on their way between the two ranks before one comes back.
        self._ahead = len(ranks) - ranks.index(rank)
        self._relay = _relayed(job, rank + 1) if rank + 1 in ranks else None
        self._used = time.process_time(), time.monotonic()
        self._group = _GROUPS / f"fleetpipe-{os.getpid()}"
        with contextlib.suppress(OSError):
            self._group.mkdir()
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        self.set(None)

    def set(self, injection: Injection | None) -> None:
        """Makes the rank slow as an injection says; None: no longer."""
        kind, factor = ("", 1.0) if injection is None else injection[:2]
        self.extra = (factor - 1) * self._usual("cpu") if kind == "compute" else 0.0
        self.data = DATA * (factor if kind == "data" else 1)
        self.save = SAVE * (factor if kind == "save" else 1)
        if self._relay is not None and self._relay.stdin is not None:
            round_trips = MICRO_BATCHES / self._ahead
            extra = (factor - 1) * self._usual("span") / (2 * round_trips)
            latency = LATENCY + (extra if kind == "link" else 0.0)
            self._relay.stdin.write(f"{latency}\n".encode())
            self._relay.stdin.flush()
        # Always some limit, which may be above all that there is.
        before, self._used = self._used, (time.process_time(), time.monotonic())
        share = (self._used[0] - before[0]) / (self._used[1] - before[1])
        quota = int(_PERIOD * share / factor) if kind == "processor" else 8 * _PERIOD
        with contextlib.suppress(OSError):
            (self._group / "cpu.cfs_quota_us").write_text(str(quota))

    def _usual(self, name: str) -> float:
        return median([getattr(row, name) for row in self._job.progress._last] or [0.0])

    def burn(self, work: Callable[[], object]) -> None:
        """Repeats some work of a layer for this micro-batch's share of the extra time."""
        end = time.thread_time() + self.extra / MICRO_BATCHES
        while time.thread_time() < end:
            work()

    def close(self) -> None:
        """Ends what belongs to it."""
        with contextlib.suppress(OSError):
            (_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
            self._group.rmdir()


def _relayed(job: Any, peer: int) -> subprocess.Popen[bytes]:
    """Puts a relay into the connection to a peer."""
    transport = job._connections
    connection = transport._connections[peer]
    transport._selector.unregister(connection.fd)
    far = os.dup(connection.fd)
    near, end = socket.socketpair()
    os.dup2(near.fileno(), connection.fd)
    os.set_blocking(connection.fd, False)
    os.set_blocking(far, True)
    transport._selector.register(connection.fd, 1, connection)
    command = [sys.executable, "-S", str(Path(__file__).with_name("relay.py"))]
    command += [str(far), str(end.fileno())]
    fds = (far, end.fileno())
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds)
    os.close(far)
    near.close()
    end.close()
    return relay


def rows_of(ranks: int, replicas: int, counts: dict[float, int], quiet: int) -> dict[str, Any]:
    """Trains on this rank; returns its rows, and its place among the others."""
    import paddle

    from fleetpipe import fleet
    from fleetpipe.fleet.meta_parallel import LayerDesc
    from fleetpipe.job.job import current_job

    started(ranks // replicas, MICRO_BATCHES, ROWS, dp=replicas)
    job = current_job()
    assert job is not None
    rank = job.hcg.get_global_rank()
    slowness: Slowness | None = None

    class Layer(paddle.nn.Linear):
        def forward(self, inputs: Any) -> Any:
            if slowness is not None and slowness.extra:
                with paddle.no_grad():
                    slowness.burn(partial(super().forward, inputs))
            return paddle.nn.functional.relu(super().forward(inputs))

    layers: list[Any] = []
    for _ in range(ranks // replicas):
        layers.append(LayerDesc(Layer, HIDDEN, HIDDEN))
        layers += [LayerDesc(paddle.nn.Linear, HIDDEN, HIDDEN) for _ in range(5)]
    model, optimizer = wrapped(layers, paddle.nn.MSELoss(), "SGD")
    slowness = Slowness(rank, job)
    batch = [paddle.ones([MICRO_BATCHES * ROWS, HIDDEN]) for _ in range(2)]
    planned = injections(ranks, replicas, counts)
    changes: dict[int, Injection | None] = {}
    for one in planned:
        changes[one.first + INJECTED] = None
        changes[one.first] = one
    rows = []
    for step in range(quiet + LEARNED + len(planned) * (INJECTED + RECOVERY)):
        # First the quiet steps.
        injection = changes.get(step - quiet, False)
        if injection is not False:
            slowness.set(injection if injection and injection.rank == rank else None)
        time.sleep(slowness.data)
        model.train_batch(batch, optimizer)
        with job.progress.saving(step):
            time.sleep(slowness.save)
        rows.append(job.progress._last[-1] if step else None)
    places = [list(job.progress.stages), job.shard[0]]
    slowness.close()
    fleet.shutdown()
    return {"rows": rows[1:], "place": places}
