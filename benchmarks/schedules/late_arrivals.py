"""Simulates every schedule with late actions, a slow link and unequal micro-batches, in any order.

    python benchmarks/schedules/late_arrivals.py [--seeds 10] [--forward 5] [--link 20]

Four ranks, 16 micro-batches, a forward of 5 ms for a rank's share of the model, twice that for a
backward, 0.2 ms for a message. Late: actions of rank 1 take three times as long in one case of ten,
and messages between ranks 1 and 2 take up to 20 ms more. Unequal: micro-batches take 0.25 to 2
times the mean. Each ratio is the mean time of the schedule as a hint, within its own memory and
with a cap of twice the ranks, by that of its fixed order; the last column is that fixed order by
the fixed 1F1B.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from statistics import mean
from typing import Any

from benchmarks.figures import parser, table
from fleetpipe.engine.ready import PATIENCE, PATIENCE_OF_FORWARDS
from fleetpipe.schedules import Action, Schedule, build, names
from fleetpipe.schedules.action import flatten
from fleetpipe.schedules.check.envelope import Envelope, without_fusion
from fleetpipe.schedules.edges import Dependencies, checked_edges

RANKS, MICRO_BATCHES, SHORTEST = 4, 16, 0.2
SLOW, LINK, LENGTHS = 1, {1, 2}, (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
CASES = {"quiet": (False, False), "late": (True, False), "unequal": (False, True)}
SHARES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def chance(*key: object) -> float:
    """Returns a number from 0 to 1 that depends on the key alone."""
    return zlib.crc32(repr(key).encode()) / 2**32


class Run:
    """One batch: ranks that run what they can, and messages under way."""

    def __init__(
        self,
        schedule: Schedule,
        typical: Callable[[Action], float],
        seconds: Callable[[Action], float],
        latency: Callable[[int, int, tuple[Any, ...]], float],
        envelopes: list[Envelope] | None,
    ) -> None:
        """Begins; without envelopes ranks keep to the order of their rows."""
        self.placement = placement = schedule.placement
        self.rows = [[*flatten(row)] for row in schedule.actions]
        self.typical, self.seconds, self.latency = typical, seconds, latency
        self.envelopes = envelopes
        self.head = [0] * placement.ranks
        self.free = [0.0] * placement.ranks
        self.here: set[tuple[Any, ...]] = set()
        self.events: list[tuple[float, int, int, tuple[Any, ...]]] = []
        self.number = count()
        self.needs = Dependencies(checked_edges(None, placement), placement.stages)

    def time(self) -> float:
        """Returns when the last action ends."""
        for rank in range(len(self.rows)):
            self._begin(rank, 0.0)
        now = 0.0
        while self.events:
            now, _, rank, message = heapq.heappop(self.events)
            self.here.update([(rank, *message)] if message else [])
            self._begin(rank, now)
        return max(self.free)

    def _candidates(self, rank: int) -> Iterator[int]:
        if self.envelopes is not None:
            yield from self.envelopes[rank].candidates()
        elif self.head[rank] < len(self.rows[rank]):
            yield self.head[rank]

    def _begin(self, rank: int, now: float) -> None:
        """Lets a rank that is free begin its first ready action, or look again later."""
        if now < self.free[rank]:
            return
        for index, place in enumerate(self._candidates(rank)):
            action = self.rows[rank][place]
            if not self._is_ready(rank, action):
                continue
            share = PATIENCE
            if action.kind == "F" and self.placement.chunks == 1:
                share = PATIENCE_OF_FORWARDS
            moment = self.free[rank] + (share * self.typical(action) if index else 0.0)
            if moment > now:
                heapq.heappush(self.events, (moment, next(self.number), rank, ()))
                continue
            self._run(rank, place, action, now)
            return

    def _is_ready(self, rank: int, action: Action) -> bool:
        return all(
            self.placement.rank_of(stage) == rank or (rank, kind, stage, action[2]) in self.here
            for kind, stage in self.needs.of(action.kind, action.stage)
        )

    def _run(self, rank: int, place: int, action: Action, now: float) -> None:
        if self.envelopes is not None:
            self.envelopes[rank].take(place)
        self.head[rank] += 1
        end = self.free[rank] = now + self.seconds(action)
        heapq.heappush(self.events, (end, next(self.number), rank, ()))
        message = ("B" if action.kind == "I" else action.kind, *action[1:])
        for other in range(len(self.rows)):
            if other != rank:
                arrival = end + self.latency(rank, other, message)
                heapq.heappush(self.events, (arrival, next(self.number), other, message))


def simulate(
    schedule: Schedule, case: str, seed: int, options: Any, cap: int | None, ready: bool
) -> float:
    """Returns the milliseconds of a batch."""
    late, unequal = CASES[case]
    chunks = schedule.placement.chunks

    def typical(action: Action) -> float:
        return float(options.forward * SHARES[action.kind] / chunks / schedule.slices)

    def seconds(action: Action) -> float:
        micro_batch = int(action.micro_batch) // schedule.slices
        took = typical(action)
        if unequal:
            took *= LENGTHS[int(chance(seed, micro_batch) * len(LENGTHS))]
        slow = late and schedule.placement.rank_of(action.stage) == SLOW
        return took * 3 if slow and chance(seed, *action) < 0.1 else took

    def latency(source: int, target: int, message: tuple[Any, ...]) -> float:
        slow = late and {source, target} == LINK
        return SHORTEST + (options.link * chance(seed, "link", *message) if slow else 0.0)

    hint = without_fusion(schedule)
    envelopes = [Envelope(hint, rank, memory_cap=cap) for rank in range(RANKS)]
    return Run(hint, typical, seconds, latency, envelopes if ready else None).time()


def ratios(name: str, case: str, options: Any, plain: float) -> tuple[list[float], float]:
    """Returns the ratios of a schedule, the last by ``plain`` or its own, and its fixed time."""
    schedule = build(name, ranks=RANKS, micro_batches=MICRO_BATCHES)
    cap = 2 * RANKS * schedule.placement.chunks
    seeds = range(options.seeds if case != "quiet" else 1)
    fixed, own, more = (
        mean(simulate(schedule, case, seed, options, most, ready) for seed in seeds)
        for most, ready in ((None, False), (None, True), (cap, True))
    )
    return [own / fixed, more / fixed, fixed / (plain or fixed)], fixed


def main() -> None:
    """Prints a table of ratios for each case."""
    options = parser(__doc__ or "")
    options.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    options.add_argument("--forward", type=float, default=5, help="milliseconds of a forward")
    options.add_argument("--link", type=float, default=20, help="most of a late message")
    chosen = options.parse_args()
    for case in CASES:
        rows, plain = [], 0.0
        for name in ("1F1B", *(each for each in names() if each not in ("1F1B", "auto"))):
            of_name, fixed = ratios(name, case, chosen, plain)
            plain = plain or fixed
            rows.append((name, *(f"{ratio:.3f}" for ratio in of_name)))
        columns = (case, "ready", f"ready, cap {2 * RANKS}", "fixed / 1F1B")
        print(table(columns, rows), end="\n\n")


if __name__ == "__main__":
    main()
