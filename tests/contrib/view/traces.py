"""Traces of steps that were simulated by themselves, with one thing that is slow."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count

from fleetpipe.contrib.view import TracedOperation
from fleetpipe.schedules import build


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
