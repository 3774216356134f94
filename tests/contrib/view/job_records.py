"""What jobs leave behind, made for tests: folders of runs, boards, traces of simulated steps."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from fleetpipe import atomic_file
from fleetpipe.contrib.view.board import FILE, JobBoard, LastCheckpoint
from fleetpipe.contrib.view.slow_ranks import SlowRank
from fleetpipe.contrib.view.traced_ops import TracedOperation
from fleetpipe.job.records import RankRecord
from fleetpipe.schedules import build

#: A name that would be a part of the page, were it not escaped.
EVIL = "<script>alert('&')</script>"


def written(folder: Path, rows: list[dict[str, Any]], **about: Any) -> Path:
    """Writes a folder with these rows, and a ``run.json`` where there is something to tell."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    if about:
        (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def row(step: int, loss: float, phase: str = "train", **values: Any) -> dict[str, Any]:
    """A row as MetricsLogger writes it, an epoch being ten steps."""
    made = {"step": step, "epoch": (step - 1) // 10, "phase": phase, "loss": loss}
    return {**made, **values, "time": 1.7e9 + step}


def schedule(name: str = "1F1B", ranks: int = 2, micro_batches: int = 4) -> dict[str, str]:
    """The schedule's part of a ``run.json``."""
    return {"name": name, "text": str(build(name, ranks=ranks, micro_batches=micro_batches))}


def board(**fields: object) -> JobBoard:
    """A job of two ranks of which one is slow and one stopped."""
    first = RankRecord(0, "operation F0.1", (0,), step=12, step_age=0.25, busy=0.75)
    second = RankRecord(1, 'B1.0 "<last>"', (1,), step=11, step_age=4.0, busy=0.5)
    running = replace(first, memory=3_000_000, incoming=2, outgoing=64, state="running")
    stopped = replace(second, memory=5_000_000, state="stopped")
    slow = (SlowRank(0, "compute", 1.5, "in the steps before"),)
    made = JobBoard(time.time(), 11, 100, 0.5, ranks=(running, stopped), slow=slow, restarts=2)
    made = replace(made, samples_per_second=64.0, last_checkpoint=LastCheckpoint(10, 3.5))
    made = replace(made, news="attempt 3, since rank 1 was ended by SIGKILL")
    return replace(made, **fields)  # type: ignore[arg-type]


def running(**fields: object) -> JobBoard:
    """A job of which both ranks run."""
    ranks = tuple(replace(rank, state="running", step_age=0.25) for rank in board().ranks)
    return replace(board(ranks=ranks), **fields)  # type: ignore[arg-type]


@contextmanager
def written_on(folder: Path, made: JobBoard, ahead: float = 0.0) -> Iterator[None]:
    """Writes a board into a folder again and again, by a clock that is ahead by some seconds."""
    over = threading.Event()

    def write() -> None:
        at = replace(made, at=time.time() + ahead)
        atomic_file.replace_text(folder / FILE, json.dumps(at.content()))

    def write_on() -> None:
        while not over.wait(0.1):
            write()

    write()
    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Slow:
    """What is slow, and by which factor.

    Attributes:
        kind: "rank", "stage", "link", "micro-batch" or "nothing".
        replica: Of the rank or the link.
        stage: Of the rank, the stage or the link, which goes to the next one.
        micro_batch: The micro-batch.
        factor: How many times as long it takes.
    """

    kind: str = "nothing"
    replica: int = 0
    stage: int = 0
    micro_batch: int = 0
    factor: float = 1.0

    @property
    def name(self) -> str:
        """What a message calls it."""
        return {
            "rank": f"stage {self.stage} of replica {self.replica}",
            "stage": f"stage {self.stage}",
            "link": f"stages {self.stage} and {self.stage + 1} of replica {self.replica}",
            "micro-batch": f"micro-batch {self.micro_batch}",
        }[self.kind]

    def of(self, replica: int, stage: int, micro_batch: int) -> float:
        """Returns the factor of a computation."""
        hit = {
            "rank": (replica, stage) == (self.replica, self.stage),
            "stage": stage == self.stage,
            "micro-batch": micro_batch == self.micro_batch,
        }
        return self.factor if hit.get(self.kind, False) else 1.0

    def of_link(self, replica: int, stage: int) -> float:
        """Returns the factor of a transfer between a stage and the next."""
        hit = self.kind == "link" and (replica, stage) == (self.replica, self.stage)
        return self.factor if hit else 1.0


def trace(
    slow: Slow,
    *,
    replicas: int = 2,
    ranks: int = 4,
    micro_batches: int = 8,
    steps: int = 2,
    noise: float = 0.02,
    seed: int = 0,
) -> list[TracedOperation]:
    """Simulates 1F1B, F taking 1 and B 2 seconds, a transfer 0.1, with normal noise on each."""
    numbers = random.Random(seed)
    operations: list[TracedOperation] = []
    begin = 0.0
    for step in range(steps):
        ends = [begin]
        for replica in range(replicas):
            sizes = ranks, micro_batches
            ends += _replica(operations, numbers, slow, begin, (step, replica), sizes, noise)
        begin = max(ends)
    return operations


def _replica(
    operations: list[TracedOperation],
    numbers: random.Random,
    slow: Slow,
    begin: float,
    place: tuple[int, int],
    sizes: tuple[int, int],
    noise: float,
) -> list[float]:
    (step, replica), (ranks, micro_batches) = place, sizes
    rows = [iter(row) for row in build("1F1B", ranks=ranks, micro_batches=micro_batches).actions]
    heads = [next(row) for row in rows]
    clocks = [begin] * ranks
    arrived: dict[tuple[str, int, int], float] = {}
    for tried in count():
        assert tried < 100_000
        waiting = [stage for stage in range(ranks) if heads[stage] is not None]
        if not waiting:
            return clocks
        stage = waiting[tried % len(waiting)]
        action = heads[stage]
        forward, k = action.kind == "F", action.micro_batch
        peer = stage - 1 if forward else stage + 1
        needed = (action.kind, peer, k)
        if 0 <= peer < ranks and needed not in arrived:
            continue
        start = max(clocks[stage], arrived.get(needed, begin))
        seconds = (1 if forward else 2) * slow.of(replica, stage, k) * (1 + numbers.gauss(0, noise))
        end = clocks[stage] = start + seconds
        operations.append(
            TracedOperation(step, replica, stage, stage, action.kind, k, start, seconds)
        )
        target, way = (stage + 1, "forward") if forward else (stage - 1, "backward")
        if 0 <= target < ranks:
            lag = 0.1 * slow.of_link(replica, min(stage, target)) * (1 + numbers.gauss(0, noise))
            arrived[action.kind, stage, k] = end + lag
            for place, name in ((stage, "send"), (target, "recv")):
                operations.append(
                    TracedOperation(step, replica, place, place, f"{way}-{name}", k, end, lag)
                )
        heads[stage] = next(rows[stage], None)
    return clocks
