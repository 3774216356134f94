"""Finds which ranks are slow, and in what, from the figures of their steps alone.

``SlowRanks`` compares all figures of all ranks, ``StepComparison`` one figure, and ``Notices``
chooses which slow ranks a log names.

A rank is compared with its peers, which run the same stages of other replicas. A rank without peers
is compared with its own earlier steps, less the slowdown that the other ranks share. A rank is slow
if seven of eight steps in a row are above a threshold and it loses a sufficient share of the step.
The threshold is learned: it lies above nearly all values of earlier undisturbed steps, and never
below ``LEAST``. A limit on a rank's processor time is known from the kernel, and needs no learned
threshold.

Computing is measured in probes, always the same small piece of work, because other work on the
machine slows both. If the probe itself takes much longer, the machine is slow.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fleetpipe.job.records import StepRow

#: The steps of a window, and how many of them must be above the threshold.
WINDOW, OF_WINDOW = 8, 7
#: The least threshold: it finds a rank that is 1.3 times slower, in spite of noise.
LEAST = 1.15
#: The least threshold of a link: 1.3 times a step is much more than 1.3 times its messages.
LEAST_LINK = 1.3
#: The fewest and the most steps from which a threshold is learned.
FEWEST, MOST = 12, 200
#: How many times the noise of earlier steps the threshold is, and a further margin over few steps.
_MARGIN, _FEW = 1.25, 6.0
#: The quantile that counts as the noise: a slowness that was not named must not hide the next one.
_NOISE_QUANTILE = 0.95
#: The first steps, which allocate memory and load code, are left out.
_WARM_UP = 3
#: The least share of a step that a slow rank loses, and that a slow link loses.
_MATTERS, _LINK_MATTERS = 0.01, 0.05
_SHORTEST = 1e-7
#: The least span in which a limit is measured: by default a kernel counts in tenths of a second.
_LIMIT_SECONDS = 0.3
LIMIT, MACHINE = "compute (processor limit)", "compute (slow machine)"
#: The least threshold of a machine: other jobs make it 1.5 times as slow now and then.
LEAST_MACHINE = 2.0
#: The logarithm of a common slowdown of the other ranks that counts as noise.
_STEADY = math.log(1.1)
#: What a rank is slow in, by the figure of a row that shows it.
_WHAT = {"cpu": "compute", "wall": "compute", "data": "data", "save": "save", "probe": MACHINE}
#: On a slower machine actions take this power of a probe's time: 0.65 to 1.15 in measured jobs,
#: since a probe runs in the interpreter alone.
_POWER = 0.75
#: Seconds for which a rank is slow before it is named.
_LASTS = 5.0
#: Seconds until a rank may be named again for the same; they double each time.
_PAUSE = 600.0
_REMEDIES = {
    "compute": "; likely its rows are longer, or something in its layers takes longer",
    "data": "; likely its loader: give it more workers, or a faster disk",
    "save": "; likely the disk that it saves to",
    LIMIT: "; give its container more processor time (cpu.max, docker's --cpus)",
    MACHINE: "; look for what else runs on its host or core, and for its clock and temperature",
}


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than its peers, or than it was.

    Attributes:
        rank: The number of the rank in the job.
        what: ``compute``, ``compute (processor limit)``, ``compute (slow machine)``, ``data``,
            ``save``, ``link to rank N``, or ``step`` and ``callbacks`` of a rank that ends no step.
        factor: How many times as long the rank takes.
        reference: What the rank is compared with, in words.
        since: The step from which on the rank is slow, from 1; 0 if unknown.
    """

    rank: int
    what: str
    factor: float
    reference: str
    since: int = 0

    def __str__(self) -> str:
        text = f"rank {self.rank} is slow: {self.what} takes {self.factor:.1f} times as long as "
        since = f", since step {self.since:,}" if self.since else ""
        return text + self.reference + since + _REMEDIES.get(self.what, "")


class StepComparison:
    """Finds the ranks that are slow in one figure (such as compute), from its value in each step.

    Attributes:
        slow: The ranks that are slow now, and how many times as long each takes.
    """

    def __init__(self, peers: Mapping[int, Sequence[int]], least: float = LEAST) -> None:
        """Begins without any figures.

        Args:
            peers: The peers of each rank; empty for ranks that are compared with their own past.
            least: The least factor from which on a rank counts as slow.
        """
        self._peers = peers
        self._least = math.log(least)
        #: By rank its earlier figures, and the factors from which its threshold is learned.
        self._figures: dict[int, deque[float]] = {rank: deque(maxlen=MOST) for rank in peers}
        self._noise: dict[int, deque[float]] = {rank: deque(maxlen=MOST) for rank in peers}
        self._usual: dict[int, float] = {}
        self._thresholds: dict[int, float] = {}
        #: What :meth:`_compare_step` returned for the last steps.
        self._recent: deque[dict[int, tuple[float, float, float]]] = deque(maxlen=WINDOW)
        self._count = 0
        self.slow: dict[int, float] = {}

    def add(self, figures: Mapping[int, float], costs: Mapping[int, float]) -> None:
        """Adds the figures of a step.

        Args:
            figures: The figure of each rank, in seconds or probes.
            costs: By rank, how much it must lose, in the same unit, to count as slow.
        """
        self._count += 1
        if self._count <= _WARM_UP:
            return
        figures = {rank: max(figure, _SHORTEST) for rank, figure in figures.items()}
        # Steps in which a rank is slow are not usual ones.
        learns = not self.slow
        if learns:
            for rank, figure in figures.items():
                self._figures[rank].append(figure)
            if self._count % WINDOW == 0 or not self._usual:
                self._learn_thresholds()
        self._recent.append(self._compare_step(figures, costs))
        if len(self._recent) == WINDOW:
            factors = {rank: self._slow_factor(rank, learns) for rank in figures}
            self.slow = {rank: factor for rank, factor in factors.items() if factor is not None}

    def _learn_thresholds(self) -> None:
        """Updates usual figures and thresholds; called once in a window, since it takes long."""
        self._usual = {rank: median(figures) for rank, figures in self._figures.items()}
        for rank, noise in self._noise.items():
            # The last window may be the beginning of a slowness.
            past = sorted(list(noise)[:-WINDOW])
            if len(past) >= FEWEST:
                most = past[int(_NOISE_QUANTILE * len(past))] - median(past)
                margin = _MARGIN + _FEW / len(past)
                self._thresholds[rank] = max(self._least, margin * most)

    def _compare_step(
        self, figures: Mapping[int, float], costs: Mapping[int, float]
    ) -> dict[int, tuple[float, float, float]]:
        """Compares the figure of each rank with that of its peers, or with its own usual one.

        Returns:
            By rank: the logarithm of how many times as long it took, the seconds that it lost, and
            its value of ``costs``.
        """
        changes = {rank: math.log(figures[rank] / self._usual[rank]) for rank in figures}
        compared = {}
        for rank, figure in figures.items():
            reference = self._usual[rank]
            if self._peers[rank]:
                reference = median(figures[peer] for peer in self._peers[rank])
            elif len(figures) > 1:
                common = median(changes[other] for other in figures if other != rank)
                reference *= math.exp(max(0.0, common - _STEADY))
            compared[rank] = math.log(figure / reference), figure - reference, costs[rank]
        return compared

    def _slow_factor(self, rank: int, learns: bool) -> float | None:
        """Returns how many times as long a rank takes if it is slow, else None.

        Args:
            rank: The rank.
            learns: Whether the factors of a rank that is not slow count as noise.
        """
        factors, lost, costs = zip(*(step[rank] for step in self._recent))
        ordered = sorted(factors)
        low, high = ordered[WINDOW - OF_WINDOW], ordered[OF_WINDOW - 1]
        # A slow rank stays slow until seven of eight steps are below the threshold again.
        shown = high if rank in self.slow else low
        slow = shown > self._thresholds.get(rank, math.inf)
        if learns and not slow:
            self._noise[rank].append(low)
        matters = median(lost) > median(costs)
        return math.exp(median(factors)) if slow and matters else None


class ProcessorLimit:
    """Measures how much longer a rank takes because of the processor limit of its container.

    Attributes:
        factor: How many times as long the rank takes; None if the limit does not matter.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._span = 0.0
        self.factor: float | None = None

    def add(self, limited: float, span: float) -> None:
        """Adds a step: the seconds that the limit kept the rank from running, and the step's."""
        self._steps.append((limited, span))
        self._span += span
        while len(self._steps) > WINDOW and self._span - self._steps[0][1] > _LIMIT_SECONDS:
            self._span -= self._steps.popleft()[1]
        factor = self._span / max(_SHORTEST, self._span - sum(lost for lost, _ in self._steps))
        # A limit that was found lasts as long as half of the threshold is exceeded.
        least = LEAST if self.factor is None else math.sqrt(LEAST)
        self.factor = factor if len(self._steps) >= WINDOW and factor > least else None


class SlowRanks:
    """Finds the slow ranks of a job, from all figures of their steps.

    Attributes:
        slow: The ranks that are slow now.
    """

    def __init__(self, stages: Mapping[int, tuple[tuple[int, ...], int]]) -> None:
        """Begins without any steps.

        Args:
            stages: By rank of the job, its stages, and its index among the ranks with the same
                stages.
        """
        #: By rank, its rows of steps that not all ranks have finished, by step.
        self._rows: dict[int, dict[int, StepRow]] = {rank: {} for rank in stages}
        peers = {
            rank: [peer for peer in stages if peer != rank and stages[peer] == stages[rank]]
            for rank in stages
        }
        self._peers = peers
        self._comparisons = {
            name: StepComparison(peers, LEAST_MACHINE if what == MACHINE else LEAST)
            for name, what in _WHAT.items()
        }
        self._links: dict[tuple[int, int], StepComparison] = {}
        #: The least seconds of messages, by the ranks that send and receive them.
        self._flights: dict[tuple[int, int], float] = {}
        self._limits = {rank: ProcessorLimit() for rank in stages}
        self.slow: list[SlowRank] = []

    def add(self, rows: Mapping[int, Sequence[StepRow]]) -> list[SlowRank]:
        """Adds finished steps of each rank, in order; returns the ranks that are slow now."""
        for rank, new in rows.items():
            self._rows[rank].update((row.step, row) for row in new)
        complete = sorted(set.intersection(*map(set, self._rows.values())))
        for step in complete:
            self._compare_ranks(step, {rank: kept[step] for rank, kept in self._rows.items()})
        if complete:
            for rank, kept in self._rows.items():
                self._rows[rank] = {n: row for n, row in kept.items() if n > complete[-1]}
        return self.slow

    def _compare_ranks(self, number: int, step: Mapping[int, StepRow]) -> None:
        """Compares a step that all ranks have finished, and updates ``slow``.

        Args:
            number: The number of the step, from 0.
            step: The row of each rank.
        """
        span = median(row.span for row in step.values())
        probes = {rank: (row.probe or 1.0) ** _POWER for rank, row in step.items()}
        for name, comparison in self._comparisons.items():
            figures = {rank: float(getattr(row, name)) for rank, row in step.items()}
            costs = dict.fromkeys(step, _MATTERS * span if name != "probe" else 0.0)
            if _WHAT[name] == "compute":
                for rank, probe in probes.items():
                    figures[rank] /= probe
                    costs[rank] /= probe
            # A figure of 0 was not measured; of data, a rank may have none to load.
            measured = any(figures.values()) if name == "data" else all(figures.values())
            if measured:
                comparison.add(figures, costs)
        self._compare_links(step, span)
        for rank, row in step.items():
            self._limits[rank].add(row.limited, row.span)
        slow: dict[tuple[int, str], float] = {}
        for name, comparison in self._comparisons.items():
            for rank, factor in comparison.slow.items():
                key = rank, _WHAT[name]
                slow[key] = max(factor, slow.get(key, 0.0))
        for (rank, peer), link in self._links.items():
            slow.update(((rank, f"link to rank {peer}"), f) for f in link.slow.values())
        for rank, limit in self._limits.items():
            if (rank, MACHINE) in slow:
                slow.pop((rank, "compute"), None)
            if limit.factor is not None:
                slow.pop((rank, "compute"), None)
                slow[rank, LIMIT] = limit.factor
        since = {(slow_rank.rank, slow_rank.what): slow_rank.since for slow_rank in self.slow}
        first = max(1, number + 2 - WINDOW)
        self.slow = [
            SlowRank(*key, factor, self._reference_in_words(*key), since.get(key, first))
            for key, factor in slow.items()
        ]

    def _reference_in_words(self, rank: int, what: str) -> str:
        """Returns what a rank is compared with, in words."""
        if what == LIMIT:
            return "without the limit"
        on_peers = self._peers[rank] and not what.startswith("link")
        return "on ranks with the same stages" if on_peers else "in the steps before"

    def _compare_links(self, step: Mapping[int, StepRow], span: float) -> None:
        """Compares links by the time from the send of a message to its receive.

        The times of both directions are added, so that the clocks may differ. A slow link delays a
        step by each message that both ends wait for. A rank that does not wait receives a message
        late, after it has computed: its time is an upper bound, so the lowest time counts.
        """
        ways = {
            (int(source), rank): (flight, awaited)
            for rank, row in step.items()
            for source, flight, awaited in zip(
                row.flights[::3], row.flights[1::3], row.flights[2::3]
            )
        }
        for way, (flight, awaited) in ways.items():
            most = math.inf if awaited else self._flights.get(way, math.inf)
            self._flights[way] = min(flight, most)
        for (rank, peer), (_, awaited) in ways.items():
            if rank < peer and (peer, rank) in ways:
                waits = min(awaited, ways[peer, rank][1])
                costs = _LINK_MATTERS * span / waits if waits else math.inf
                link = self._links.setdefault((rank, peer), StepComparison({rank: []}, LEAST_LINK))
                both = self._flights[rank, peer] + self._flights[peer, rank]
                link.add({rank: both}, {rank: costs})


class Notices:
    """Chooses the slow ranks that a log names: slow for 5 s, and again after longer and longer.

    The pauses grow since, on a desktop computer, other work often comes and goes.

    Attributes:
        past: The ranks that had been slow for 5 s, and are not any more.
    """

    def __init__(self) -> None:
        self.past: list[SlowRank] = []
        self._lasting: dict[tuple[int, str], SlowRank] = {}
        self._since: dict[tuple[int, str], float] = {}
        self._named: set[tuple[int, str]] = set()
        self._due: dict[tuple[int, str], float] = {}
        self._pauses: defaultdict[tuple[int, str], float] = defaultdict(lambda: _PAUSE)

    def choose(self, slow: Sequence[SlowRank], now: float) -> list[SlowRank]:
        """Returns the slow ranks that a log has to name now.

        Args:
            slow: The ranks that are slow now.
            now: The present time in seconds.
        """
        by_key = {(slow_rank.rank, slow_rank.what): slow_rank for slow_rank in slow}
        self._since = {key: self._since.get(key, now) for key in by_key}
        lasts = {key for key, since in self._since.items() if now >= since + _LASTS}
        self.past = [slow_rank for key, slow_rank in self._lasting.items() if key not in lasts]
        self._lasting = {key: slow_rank for key, slow_rank in by_key.items() if key in lasts}
        self._named &= set(by_key)
        chosen = []
        for key, slow_rank in self._lasting.items():
            if key not in self._named and now >= self._due.get(key, now):
                self._due[key] = now + self._pauses[key]
                self._pauses[key] *= 2
                self._named.add(key)
                chosen.append(slow_rank)
        return chosen
