"""Makes orders of actions for the search: of F and I on any placement, then with W inserted.

A ``Problem`` has the stages, their costs, and the memory of a rank. ``warm_up_order``, for one
stage on each rank, makes an order of some forwards followed by I and F in turn; ``listed_order``,
for any placement, lets each free rank take the best ready action. ``fill`` inserts W where a rank
would wait or must free memory.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.schedules.action import Action, flatten
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.placement import Placement
from fleetpipe.schedules.rows import ScheduleRows
from fleetpipe.schedules.simulation import Timeline

#: The kinds of actions in the order of their columns; each has a column for every stage.
COLUMNS = "FIW"

#: By rank the number of forwards before its first I.
WarmUp = tuple[int, ...]

#: How much longer than until its first I a rank warms up, in times of a forward.
_SLACKS = tuple(quarters / 4 for quarters in range(9))


@dataclass(frozen=True)
class Problem:
    """A placement, m and costs for which the search looks for an order of actions.

    An order has a row of integer codes for each rank, which makes a search fast: with S stages the
    action (kind, stage, k) has the code ``k * 3S + column``, where the columns of F begin at 0,
    those of I at S, and those of W at 2S. The codes of a micro-batch are adjacent, so that an
    action is at a fixed distance from the one that it waits for.

    Args:
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.
        costs: The time and memory of actions.
        cap: Most that a rank may hold at once, in forwards of one stage, or in bytes if the costs
            give bytes.
    """

    placement: Placement
    micro_batches: int
    costs: Costs
    cap: float = math.inf

    @property
    def width(self) -> int:
        """Distance between the codes of one action in consecutive micro-batches."""
        return 3 * self.placement.stages

    @property
    def length(self) -> int:
        """Number of actions, which are F, I and W of each stage and micro-batch."""
        return 3 * self.placement.stages * self.micro_batches

    @cached_property
    def durations(self) -> list[float]:
        """Time of the action in each column of a code."""
        stages = range(self.placement.stages)
        return [self.costs.of(kind, stage) for kind in COLUMNS for stage in stages]

    @cached_property
    def amounts(self) -> list[float]:
        """The memory that a forward of each stage holds."""
        if self.costs.bytes is None:
            return [1] * self.placement.stages
        return [self.costs.bytes_of(Action("F", s, 0)) for s in range(self.placement.stages)]

    @cached_property
    def waits(self) -> list[tuple[int, float]]:
        """For each column of F and I the distance to the action it waits for, and the latency.

        Of several dependencies along a chain the last one implies the others. A distance of 0
        means that there is none.
        """
        stages, rank_of = self.placement.stages, self.placement.rank_of
        # The latency of the value that leaves a stage, and of its gradient.
        latencies = [
            self.costs.comm_of(stage) if rank_of(stage) != rank_of(stage + 1) else 0
            for stage in range(stages - 1)
        ]
        forwards = [(0, 0), *((-1, latency) for latency in latencies)]
        return [*forwards, *((1, latency) for latency in latencies), (-stages, 0)]

    @cached_property
    def followers(self) -> list[int]:
        """For each column of F and I the rank that waits for its value; -1 if there is none."""
        stages, rank_of = self.placement.stages, self.placement.rank_of
        forward = [rank_of(stage + 1) for stage in range(stages - 1)]
        return [*forward, -1, -1, *(rank_of(stage - 1) for stage in range(1, stages))]

    @cached_property
    def work(self) -> list[float]:
        """The total time of each rank's actions, summed once so that all uses have one rounding."""
        stages, parts = self.placement.stages, range(3)
        return [
            self.micro_batches
            * sum(self.durations[part * stages + stage] for stage in owned for part in parts)
            for owned in map(self.placement.stages_of, range(self.placement.ranks))
        ]

    @cached_property
    def bound(self) -> float:
        """A lower bound of the span of any schedule with split backwards.

        With one chunk: between the first F and the last W of rank 0, a value must reach each other
        rank, which computes all its F and I, and a gradient must come back.
        """
        least = max(self.work)
        if self.placement.chunks > 1:
            return least
        ranks = self.placement.ranks
        forwards, input_grads = self.durations[:ranks], self.durations[ranks : 2 * ranks]
        way: float = 0
        for rank, (forward, input_grad) in enumerate(zip(forwards, input_grads)):
            around = way + self.micro_batches * (forward + input_grad) + self.durations[2 * ranks]
            least = max(least, around)
            way += forward + input_grad + 2 * self.costs.comm_of(rank)
        return least

    def check_cap(self) -> None:
        """Raises ConfigError if the cap does not let a single micro-batch pass."""
        ranks = range(self.placement.ranks)
        needs = [sum(self.amounts[s] for s in self.placement.stages_of(rank)) for rank in ranks]
        if not self.cap >= max(needs):
            rank = needs.index(max(needs))
            unit = "forwards of one stage" if self.costs.bytes is None else "bytes"
            stages = " and ".join(map(str, self.placement.stages_of(rank)))
            raise ConfigError(
                f"no schedule keeps within a memory cap of {self.cap:.10g} {unit}",
                where=f"rank {rank}, which holds one forward of stage {stages} at once",
                expected=f"a cap of at least {max(needs):.10g}",
                fix=f"raise the cap to {max(needs):.10g}",
            )

    def holds(self, timeline: Timeline) -> bool:
        """Whether no rank of a simulated schedule exceeds the cap."""
        if timeline.peak_bytes is not None:
            return max(timeline.peak_bytes) <= self.cap
        return max(timeline.peak_activations) / timeline.schedule.slices <= self.cap

    @property
    def hidden(self) -> float:
        """The longest latency, divided by the time of the shortest F and B of a stage."""
        stages, costs = range(self.placement.stages), self.costs
        latency = max(costs.comm_of(stage) for stage in stages)
        least = min(costs.of("F", stage) + costs.of("B", stage) for stage in stages)
        if latency == 0:
            return 0
        return min(latency / least, self.micro_batches) if least else self.micro_batches

    def order_of(self, schedule: ScheduleRows) -> list[list[int]]:
        """Returns the codes of each rank's F and I in the order of a schedule; B counts as I."""
        width, first = self.width, {"F": 0, "I": self.placement.stages, "B": self.placement.stages}
        return [
            [k * width + first[kind] + stage for kind, stage, k in row if kind != "W"]
            for row in map(flatten, schedule.actions)
        ]

    def schedule_of(self, name: str, rows: list[list[int]]) -> ScheduleRows:
        """Returns the schedule with these rows of codes."""
        stages = self.placement.stages
        kinds = [(kind, stage) for kind in COLUMNS for stage in range(stages)]
        actions = tuple(
            tuple(Action(*kinds[code % self.width], code // self.width) for code in row)
            for row in rows
        )
        return ScheduleRows(name, self.placement, self.micro_batches, actions)


def warm_up_order(problem: Problem, warm_up: WarmUp) -> list[list[int]]:
    """Returns the order of F and I in which rank r begins with ``warm_up[r]`` forwards."""
    width, stages = problem.width, problem.placement.stages
    rows = []
    for stage, first in enumerate(warm_up):
        forwards = [k * width + stage for k in range(problem.micro_batches)]
        input_grads = [code + stages for code in forwards]
        row = forwards[:first]
        for input_grad, forward in zip(input_grads, forwards[first:]):
            row += (input_grad, forward)
        rows.append(row + input_grads[len(forwards) - first :])
    return rows


def most_forwards(problem: Problem) -> list[int]:
    """Returns for each rank the number of forwards that it may hold, at most m."""
    return [
        int(min(problem.micro_batches, problem.cap / amount if amount else problem.micro_batches))
        for amount in problem.amounts
    ]


def is_allowed(warm_up: WarmUp, most: list[int]) -> bool:
    """Whether each rank warms up within its memory, and no longer than the rank that feeds it."""
    return all(1 <= first <= limit for first, limit in zip(warm_up, most)) and all(
        earlier >= later for earlier, later in itertools.pairwise(warm_up)
    )


def warm_ups(problem: Problem) -> list[WarmUp]:
    """Returns the warm-ups to try first, each once.

    Some fill the time until the first I, with more or less slack, with or without a last forward
    that delays it; the others are those of 1F1B, ZBH1 and ZBH2.
    """
    ranks, most = problem.placement.ranks, most_forwards(problem)
    candidates = [_fill(problem, most, slack, late) for slack in _SLACKS for late in (False, True)]
    candidates += [tuple(k * (ranks - 1 - rank) + 1 for rank in range(ranks)) for k in (1, 2)]
    return list(dict.fromkeys(_fit(warm_up, most) for warm_up in candidates))


def _fill(problem: Problem, most: list[int], slack: float, late: bool) -> WarmUp:
    """Returns the warm-up that fills each rank's time until its first I.

    Args:
        problem: The costs.
        most: For each rank the number of forwards that it may hold.
        slack: Time to fill beyond that, in times of a forward.
        late: Whether the last forward may delay the first I, rather than leave a gap before it.
    """
    stages, comm_of = problem.placement.stages, problem.costs.comm_of
    forwards, input_grads = problem.durations[:stages], problem.durations[stages : 2 * stages]
    begins = [sum(forwards[:stage]) + sum(map(comm_of, range(stage))) for stage in range(stages)]
    warm_up = [1]
    ended = begins[-1] + forwards[-1] + input_grads[-1]
    for stage in reversed(range(stages - 1)):
        arrival = ended + comm_of(stage)
        gap = arrival - begins[stage]
        fitting = gap / forwards[stage] if forwards[stage] else warm_up[0]
        # Rounding must neither remove a forward nor add one.
        first = int(fitting + slack + (1 - 1e-6 if late else 1e-6))
        warm_up.insert(0, min(max(first, warm_up[0] + 1), most[stage]))
        ended = max(arrival, begins[stage] + warm_up[0] * forwards[stage]) + input_grads[stage]
    return tuple(warm_up)


def _fit(warm_up: WarmUp, most: list[int]) -> WarmUp:
    """Reduces a warm-up to the allowed one."""
    fitted: list[int] = []
    for first, limit in zip(warm_up, most):
        fitted.append(min(first, limit, *fitted[-1:]))
    return tuple(fitted)


class Preference(NamedTuple):
    """Decides which action a rank takes if several are ready.

    Args:
        alternate: Whether it takes an F after an I and an I after an F; else it takes the I.
        shallow: Whether it takes the F of its first stage; else that of its last.
    """

    alternate: bool = False
    shallow: bool = False


def listed_order(problem: Problem, preference: Preference) -> list[list[int]]:
    """Returns the codes of each rank's F and I in an order that keeps within the cap."""
    lister = _Lister(problem, preference)
    lister.run()
    return lister.rows


class _Lister:
    """The clock of all ranks: the values that have arrived, and the memory each rank holds."""

    def __init__(self, problem: Problem, preference: Preference) -> None:
        ranks = range(problem.placement.ranks)
        self.problem, self.preference = problem, preference
        self.owned = [problem.placement.stages_of(rank) for rank in ranks]
        self.rest = 1 - problem.costs.input_grad_frees
        columns = 2 * problem.placement.stages
        # For each column of F and I: the next micro-batch, and when each one's input arrived.
        self.next = [0] * columns
        self.arrivals: list[list[float]] = [[] for _ in range(columns)]
        self.arrivals[0] = [0] * problem.micro_batches
        self.clocks: list[float] = [0 for _ in ranks]
        self.last_was_forward = [False for _ in ranks]
        self.whole: list[float] = [0 for _ in ranks]
        self.halves: list[float] = [0 for _ in ranks]
        self.pending: list[deque[int]] = [deque() for _ in ranks]
        self.rows: list[list[int]] = [[] for _ in ranks]
        self.events: list[tuple[float, int]] = [(0, rank) for rank in ranks]

    def run(self) -> None:
        """Handles events until all actions are done: a rank becomes free, or a value arrives."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.clocks[rank]:
                self._act(rank, now)

    def _act(self, rank: int, now: float) -> None:
        """Starts the preferred action of a free rank, else a W, else nothing."""
        column = self._choice(rank, now)
        stages = self.problem.placement.stages
        if column is None:
            if not self.pending[rank]:
                return
            stage = self.pending[rank].popleft()
            self.halves[rank] -= self.problem.amounts[stage]
            end = now + self.problem.durations[2 * stages + stage]
        else:
            end = now + self.problem.durations[column]
            self._begin(rank, column, end)
        self.clocks[rank] = end
        heapq.heappush(self.events, (end, rank))

    def _begin(self, rank: int, column: int, end: float) -> None:
        """Starts the next F or I of a column, and schedules the arrival of its value."""
        problem, stages = self.problem, self.problem.placement.stages
        amount = problem.amounts[column % stages]
        self.rows[rank].append(self.next[column] * problem.width + column)
        self.next[column] += 1
        self.last_was_forward[rank] = column < stages
        if column < stages:
            self.whole[rank] += amount
        else:
            self.whole[rank] -= amount
            self.halves[rank] += amount
            self.pending[rank].append(column - stages)
        if column == stages:  # nothing waits for the I of stage 0
            return
        step = stages if column == stages - 1 else 1 if column < stages else -1
        arrival = end + problem.waits[column + step][1]
        self.arrivals[column + step].append(arrival)
        if problem.followers[column] >= 0:
            heapq.heappush(self.events, (arrival, problem.followers[column]))

    def _choice(self, rank: int, now: float) -> int | None:
        """Returns the column of the best ready action; None if none is ready."""
        stages, owned = self.problem.placement.stages, self.owned[rank]
        input_grads = [s + stages for s in owned if self._has_arrived(s + stages, now)]
        forwards = [s for s in owned if self._has_arrived(s, now) and self._fits(rank, s)]
        forward_first = self.preference.alternate and not self.last_was_forward[rank]
        if not input_grads or (forwards and forward_first):
            best = min if self.preference.shallow else max
            return best(forwards, default=None)
        # The oldest micro-batch first; of one micro-batch the deepest stage.
        return min(input_grads, key=lambda column: (self.next[column], -column))

    def _has_arrived(self, column: int, now: float) -> bool:
        arrivals, following = self.arrivals[column], self.next[column]
        return following < len(arrivals) and arrivals[following] <= now

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether a forward leaves the memory that the oldest micro-batch will still need."""
        amounts, owned = self.problem.amounts, self.owned[rank]
        oldest = self.next[owned[-1]]
        needed = sum(amounts[other] for other in owned if self.next[other] <= oldest)
        if self.next[stage] > oldest:
            needed += amounts[stage]
        held = self.whole[rank] + self.rest * self.halves[rank]
        return held + needed <= self.problem.cap


class Policy(NamedTuple):
    """Decides when a rank waits although it could compute a W.

    Args:
        patience: The total time that a rank may wait before it runs a W and delays its next action.
        tail: The number of the last F and I of each rank that no W may delay.
    """

    patience: float = 0
    tail: int = 0


class Filled(NamedTuple):
    """An order of F and I with W inserted.

    Args:
        rows: Codes of each rank; see :class:`Problem`.
        spans: For each rank the time from its first begin to its last end.
        makespan: From time 0 to the last end of any rank.
    """

    rows: list[list[int]]
    spans: list[float]
    makespan: float


def fill(
    problem: Problem, order: list[list[int]], policy: Policy, longest: float = math.inf
) -> Filled | None:
    """Inserts the W into an order of F and I; each rank runs them in the order of its I.

    The result does not depend on the order in which ranks are visited, since each rank decides by
    its own state alone.

    Args:
        problem: Costs and memory.
        order: For each rank the codes of all its F and I.
        policy: Decides when a rank waits.
        longest: The most span of a rank.

    Returns:
        None if the order deadlocks, exceeds the memory cap or takes too long.
    """
    filler = _Filler(problem, order, policy, longest)
    return filler.result() if filler.run() else None


class _Filler:
    """The state of each rank: its position, the memory it holds, and the time it has waited."""

    def __init__(
        self, problem: Problem, order: list[list[int]], policy: Policy, longest: float
    ) -> None:
        ranks = range(len(order))
        self.problem, self.order, self.policy = problem, order, policy
        self.rest = 1 - problem.costs.input_grad_frees
        self.limits = [longest - work for work in problem.work]
        self.finished: list[float] = [-1] * (problem.width * problem.micro_batches)
        self.reached = [0 for _ in ranks]
        self.begins: list[float] = [0 for _ in ranks]
        self.clocks: list[float] = [0 for _ in ranks]
        self.waited: list[float] = [0 for _ in ranks]
        # The memory of forwards before their I, and after it: see `amounts_in_flight`.
        self.whole: list[float] = [0 for _ in ranks]
        self.halves: list[float] = [0 for _ in ranks]
        self.pending: list[deque[int]] = [deque() for _ in ranks]
        self.rows: list[list[int]] = [[] for _ in ranks]

    def run(self) -> bool:
        """Runs every rank to the end of its order; False if that is impossible."""
        ready = list(range(len(self.order)))
        while ready:
            if not self._advance(ready.pop(), ready):
                return False
        return self.reached == [len(row) for row in self.order]

    def _advance(self, rank: int, ready: list[int]) -> bool:
        """Runs one rank until it lacks an input; False if it cannot go on at all."""
        problem, order, row = self.problem, self.order[rank], self.rows[rank]
        width, stages, cap = problem.width, problem.placement.stages, problem.cap
        waits, durations, amounts = problem.waits, problem.durations, problem.amounts
        followers, finished, pending = problem.followers, self.finished, self.pending[rank]
        for position in range(self.reached[rank], len(order)):
            code = order[position]
            column = code % width
            distance, delay = waits[column]
            ended = finished[code + distance] if distance else 0
            if ended < 0:
                return True
            arrival = ended + delay
            amount = amounts[column % stages]
            if column < stages:
                held = self.whole[rank] + amount + self.rest * self.halves[rank]
                if held > cap and not self._make_room(rank, amount):
                    return False
            if arrival > self.clocks[rank] and not self._wait(rank, arrival, position):
                return False
            row.append(code)
            self.clocks[rank] = finished[code] = self.clocks[rank] + durations[column]
            self.reached[rank] = position + 1
            if column < stages:
                self.whole[rank] += amount
            else:
                self.whole[rank] -= amount
                self.halves[rank] += amount
                pending.append(code + stages)
            if followers[column] >= 0:
                ready.append(followers[column])
        return True

    def _make_room(self, rank: int, amount: float) -> bool:
        """Runs W until a forward fits into memory; False if no W is left."""
        while self.whole[rank] + amount + self.rest * self.halves[rank] > self.problem.cap:
            if not self.pending[rank]:
                return False
            self._weight_grad(rank)
        return True

    def _wait(self, rank: int, arrival: float, position: int) -> bool:
        """Runs W during a wait, or just waits; False if the rank has waited too long."""
        if not self.rows[rank]:
            self.begins[rank] = self.clocks[rank] = arrival
            return True
        pending, durations, width = self.pending[rank], self.problem.durations, self.problem.width
        while pending and self.clocks[rank] + durations[pending[0] % width] <= arrival:
            self._weight_grad(rank)
        gap = arrival - self.clocks[rank]
        if gap <= 0:
            return True
        calm = position >= len(self.order[rank]) - self.policy.tail
        if pending and not calm and self.waited[rank] + gap > self.policy.patience:
            self._weight_grad(rank)
            return True
        self.waited[rank] += gap
        self.clocks[rank] = arrival
        return self.waited[rank] <= self.limits[rank]

    def _weight_grad(self, rank: int) -> None:
        code = self.pending[rank].popleft()
        column = code % self.problem.width
        self.rows[rank].append(code)
        self.clocks[rank] += self.problem.durations[column]
        self.halves[rank] -= self.problem.amounts[column % self.problem.placement.stages]

    def result(self) -> Filled:
        """Returns the result, with pending W at the end of each rank's row."""
        for rank, pending in enumerate(self.pending):
            while pending:
                self._weight_grad(rank)
        spans = [clock - begin for clock, begin in zip(self.clocks, self.begins)]
        return Filled(self.rows, spans, max(self.clocks))
