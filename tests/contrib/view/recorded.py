"""Twelve runs as they are recorded, by the package's own writers and a clock that is given.

Two ranks train; every step takes half a second. Each run has one thing that its owner must see.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from fleetpipe.contrib.view.reporting import BoardWriter
from fleetpipe.job import run_files
from fleetpipe.job.allow import Allow
from fleetpipe.job.records import PARTS, LastRecord, RankRecord, RunProgress, StepRow

SPAN = 0.5
#: Seconds of a step that pass between it and the one before, by part.
Parts = dict[str, float]


def usual(step: int) -> Parts:
    """Every step loads its data in 10 ms."""
    return {"data": 0.01}


def falling(step: int) -> float:
    """A loss that falls."""
    return 2.0 / (1.0 + step / 50)


@dataclass
class RecordedRun:
    """A run that is being recorded.

    Attributes:
        folder: Its folder.
        until: Seconds since 1970 at which its steps end.
        steps: Steps that are done.
        planned: Steps of the whole run.
        factor: How many times as long rank 1 computes, by step.
        between: What passes between two steps, by step.
        loss: The loss, by step.
        peers: Whether both ranks run the same stage, in two replicas.
    """

    folder: Path
    until: float
    steps: int = 200
    planned: int = 400
    factor: Callable[[int], float] = lambda step: 1.0
    between: Callable[[int], Parts] = usual
    loss: Callable[[int], float] = falling
    peers: bool = False
    spent: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    saved: int | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.now = self.until - sum(map(self.span, range(1, self.steps + 1)))
        self.job = SimpleNamespace(progress=RunProgress(), allow=Allow())
        self.job.progress.folders.append(self.folder)
        self.writer = BoardWriter(self.job, self.now)  # type: ignore[arg-type]
        self.chance = random.Random(0)
        self.saved_at = 0.0
        self.line("begin", step=0)

    def span(self, step: int) -> float:
        """The seconds of a step, which the slower rank decides."""
        return SPAN * self.factor(step) + sum(self.between(step).values())

    def line(self, event: str, **more: Any) -> None:
        line = {"event": event, "life": 1, "time": self.now, "process": "a", **more}
        run_files.append_line(self.folder / run_files.ATTEMPTS, line)

    def train(self, first: int = 1, last: int | None = None) -> RecordedRun:
        """Records steps, each with a row of metrics and a board."""
        for step in range(first, (last or self.steps) + 1):
            self.now += self.span(step)
            between, loss = self.between(step), self.loss(step)
            computing = SPAN * self.factor(step)
            passed = {"compute": 0.8 * computing, "waiting": 0.2 * computing, **between}
            self.spent = [s + passed.get(part, 0.0) for part, s in zip(PARTS, self.spent)]
            if between.get("saves"):
                self.saved, self.saved_at = step, self.now
            progress = self.job.progress
            progress.step = step
            progress.note({"loss": loss, "step time": self.span(step)})
            row = {"step": step, "epoch": 0, "phase": "train", "loss": loss, "time": self.now}
            run_files.append_line(self.folder / run_files.METRICS, row)
            self.writer.add(self.heard(step), self.now)
        return self

    def record(self, rank: int, step: int, **fields: Any) -> RankRecord:
        """What a rank sends after a step."""
        between, span = self.between(step), self.span(step)
        noise = self.chance.gauss(1.0, 0.02)
        computing = 0.4 * noise * (self.factor(step) if rank == 1 else 1.0)
        data, save = between.get("data", 0.0), between.get("saves", 0.0)
        row = StepRow(step - 1, span, computing, computing, data * noise, save * noise)
        stages, replica = ((0,), rank) if self.peers else ((rank,), 0)
        mean = fmean(self.span(past) for past in range(max(1, step - 9), step + 1))
        made = RankRecord(rank, f"B{rank}.3", stages=stages, replica=replica, step=step)
        made = replace(made, steps=self.planned, step_age=0.1, step_time=mean, usual_step=SPAN)
        made = replace(made, busy=self.spent[0] / sum(self.spent), spent=tuple(self.spent))
        made = replace(made, samples=32, memory=334_000_000, saved=self.saved, rows=(row,))
        if self.saved is not None:
            made = replace(made, saved_age=self.now - self.saved_at)
        return replace(made, **fields)

    def heard(self, step: int) -> dict[int, LastRecord]:
        return {rank: LastRecord(self.record(rank, step)) for rank in (0, 1)}

    def close(self) -> None:
        """Ends the run as a training that is over does."""
        self.line("end", step=self.steps, code=0)
        self.writer.close(self.record(0, self.steps), self.now)


def slow_in(*periods: range) -> Callable[[int], float]:
    return lambda step: 2.5 if any(step in period for period in periods) else 1.0


def dead(folder: Path, now: float) -> None:
    RecordedRun(folder, now - 3600).train()


def hung(folder: Path, now: float) -> None:
    """Rank 0 waits for rank 1, which has been in one backward for 20 s."""
    run = RecordedRun(folder, now).train()
    waiting, stuck = (run.record(rank, run.steps, step_age=20.0, rows=()) for rank in (0, 1))
    heard = {0: LastRecord(replace(waiting, awaited=1)), 1: LastRecord(stuck)}
    run.writer.add(heard, run.now)


def slow_loader(folder: Path, now: float) -> None:
    RecordedRun(folder, now, between=lambda step: {"data": 0.6}).train()


def slow_always(folder: Path, now: float) -> None:
    RecordedRun(folder, now, factor=slow_in(range(1, 999)), peers=True).train()


def slow_now_and_then(folder: Path, now: float) -> None:
    RecordedRun(folder, now, factor=slow_in(range(61, 101), range(141, 171))).train()


def slow_at_the_start(folder: Path, now: float) -> None:
    RecordedRun(folder, now, factor=slow_in(range(1, 81)), peers=True).train()


def slow_save(folder: Path, now: float) -> None:
    def between(step: int) -> Parts:
        return {"data": 0.01, **({"saves": 4.0} if step % 10 == 0 else {})}

    RecordedRun(folder, now, between=between).train()


def with_nan(folder: Path, now: float) -> None:
    RecordedRun(folder, now, loss=lambda step: falling(step) if step < 147 else math.nan).train()


def diverging(folder: Path, now: float) -> None:
    RecordedRun(
        folder, now, loss=lambda step: falling(min(step, 100)) * max(1.0, 1.05 ** (step - 100))
    ).train()


def healed(folder: Path, now: float) -> None:
    run = RecordedRun(folder, now).train(last=120)
    text = "rank 1 was ended by SIGKILL, another process has its place"
    run.job.progress.note_event(
        "healed", f"{text}: the job stood for 2.1 s, and goes on after 120 steps"
    )
    run.train(first=121)


def finished(folder: Path, now: float) -> None:
    RecordedRun(folder, now, planned=200, between=saving_by_50).train().close()


def saving_by_50(step: int) -> Parts:
    return {"data": 0.01, **({"saves": 0.2} if step % 50 == 0 else {})}


def two_jobs(folder: Path, now: float) -> None:
    first, second = RecordedRun(folder, now).train(last=100), RecordedRun(folder, now)
    for step in range(1, 101):
        second.train(step, step)
        first.train(100 + step, 100 + step)


#: What writes each run, by what is the matter with it.
RUNS: dict[str, Callable[[Path, float], None]] = {
    "dead": dead,
    "hung": hung,
    "slow loader": slow_loader,
    "slow rank, always": slow_always,
    "slow rank, now and then": slow_now_and_then,
    "slow rank, at the start": slow_at_the_start,
    "slow save": slow_save,
    "NaN": with_nan,
    "diverging": diverging,
    "healed": healed,
    "finished": finished,
    "two jobs in one folder": two_jobs,
}
