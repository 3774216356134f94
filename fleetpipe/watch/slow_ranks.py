"""Which ranks are slow, and in what: a pure function of the steps that they tell of.

A rank is compared with its peers, those that run the same stages of other replicas; one without
peers with its own earlier steps, less what the other ranks have become slower by meanwhile. Its
figure counts where seven of eight steps in a row are above a threshold, and what is lost is a part
of the step that matters. The threshold is learned: it lies above all that the undisturbed steps
before have shown, and never below ``LEAST``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from fleetpipe.watch.records import StepRow

#: Steps in a row that are looked at together, and of how many the slowness is to be seen.
WINDOW, OF_WINDOW = 8, 7
#: The least threshold: it finds what is 1.3 times slower, and leaves room for chance below.
LEAST = 1.15
#: Steps from which a threshold is learned: the least, and the most.
FEWEST, MOST = 12, 200
#: How far the threshold lies above what chance has shown, and further after few steps.
_MARGIN, _FEW = 1.25, 6.0
#: The first steps allocate memory and load code.
_WARM_UP = 3
#: The least part of a step that a slowness costs.
_MATTERS = 0.01
_SHORTEST = 1e-7
#: The logarithm of how much a machine may change before the threshold rises with it.
_STEADY = math.log(1.1)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow.

    Attributes:
        rank: Its rank in the job.
        what: ``compute``, ``data``, ``save``, or ``link to rank N``.
        factor: How many times as long it takes.
    """

    rank: int
    what: str
    factor: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: {self.what} takes {self.factor:.1f} times as long"


class _Compared(NamedTuple):
    """A figure beside what it is compared with.

    Attributes:
        factor: The logarithm of how many times as long it took.
        lost: Seconds more than that.
        span: Seconds of the step.
        doubt: By how much the threshold is higher in this step.
    """

    factor: float
    lost: float
    span: float
    doubt: float


class StepComparison:
    """One figure of all ranks, step by step."""

    def __init__(self, peers: Mapping[int, Sequence[int]], has_floor: bool = False) -> None:
        """Knows nothing yet.

        Args:
            peers: What each is compared with; nothing for those that have only their own past.
            has_floor: Whether chance only adds to a figure: then one of the least is the usual one.
        """
        self._peers = peers
        self._margin, self._share = (2 * _MARGIN, 5) if has_floor else (_MARGIN, 2)
        self._figures: dict[int, deque[float]] = {rank: deque(maxlen=MOST) for rank in peers}
        self._chance: dict[int, deque[float]] = {rank: deque(maxlen=MOST) for rank in peers}
        self._usual: dict[int, float] = {}
        self._thresholds: dict[int, float] = {}
        self._recent: deque[dict[int, _Compared]] = deque(maxlen=WINDOW)
        self._count = 0
        self.slow: dict[int, float] = {}

    def add(self, figures: Mapping[int, float], span: float, doubt: float = 0.0) -> None:
        """Takes the figures of a step.

        Args:
            figures: Seconds, of all.
            span: Seconds of the whole step.
            doubt: By how much the logarithm of the threshold is higher in this step, where no
                others beside tell whether the machine is as it was when that was learned.
        """
        self._count += 1
        if self._count <= _WARM_UP:
            return
        figures = {rank: max(figure, _SHORTEST) for rank, figure in figures.items()}
        # Where somebody is slow, what is seen is not what is usual.
        learns = not self.slow
        if learns:
            for rank, figure in figures.items():
                self._figures[rank].append(figure)
            if self._count % WINDOW == 0 or not self._usual:
                self._learn()
        self._recent.append(self._compared(figures, span, doubt))
        if len(self._recent) == WINDOW:
            factors = {rank: self._factor(rank, learns) for rank in figures}
            self.slow = {rank: factor for rank, factor in factors.items() if factor is not None}

    def _learn(self) -> None:
        """Works out what is usual, and how far chance goes; once in a window, for it takes long."""
        self._usual = {
            rank: sorted(figures)[len(figures) // self._share]
            for rank, figures in self._figures.items()
        }
        for rank, chance in self._chance.items():
            # The last ones may be the beginning of what is to be noticed.
            past = list(chance)[:-WINDOW]
            if len(past) >= FEWEST:
                most = max(past) - median(past)
                margin = self._margin + _FEW / len(past)
                self._thresholds[rank] = max(math.log(LEAST), margin * most)

    def _compared(
        self, figures: Mapping[int, float], span: float, doubt: float
    ) -> dict[int, _Compared]:
        changes = {rank: math.log(figures[rank] / self._usual[rank]) for rank in figures}
        compared = {}
        for rank, figure in figures.items():
            reference = self._usual[rank]
            if self._peers[rank]:
                reference = median(figures[peer] for peer in self._peers[rank])
            elif len(figures) > 1:
                common = median(changes[one] for one in figures if one != rank)
                reference *= math.exp(max(0.0, common))
                doubt = max(0.0, abs(common) - _STEADY)
            factor = math.log(figure / reference)
            compared[rank] = _Compared(factor, figure - reference, span, doubt)
        return compared

    def _factor(self, rank: int, learns: bool) -> float | None:
        """Returns the factor of one that is slow, else None."""
        factors, lost, spans, doubts = zip(*(step[rank] for step in self._recent))
        ordered = sorted(factors)
        low, high = ordered[WINDOW - OF_WINDOW], ordered[OF_WINDOW - 1]
        if learns:
            self._chance[rank].append(low)
        if rank not in self._thresholds:
            return None
        # What was slow stays so until as many steps are below the threshold again.
        shown = high if rank in self.slow else low
        slow = shown > self._thresholds[rank] + median(doubts)
        matters = median(lost) > _MATTERS * median(spans)
        return math.exp(median(factors)) if slow and matters else None


class SlowRanks:
    """All figures of all ranks."""

    def __init__(self, places: Mapping[int, tuple[tuple[int, ...], int]]) -> None:
        """Knows nothing yet.

        Args:
            places: By rank of the job its stages, and its place among those that share them.
        """
        self._rows: dict[int, dict[int, StepRow]] = {rank: {} for rank in places}
        peers = {
            rank: [other for other in places if other != rank and places[other] == place]
            for rank, place in places.items()
        }
        names = ("cpu", "wall", "data", "save")
        self._comparisons = {name: StepComparison(peers) for name in names}
        self._links: dict[tuple[int, int], StepComparison] = {}
        self._spans: deque[float] = deque(maxlen=MOST)
        self.slow: list[SlowRank] = []

    def add(self, rows: Mapping[int, Sequence[StepRow]]) -> list[SlowRank]:
        """Takes steps that ranks have done, each in its order; returns who is slow now."""
        for rank, new in rows.items():
            self._rows[rank].update((row.step, row) for row in new)
        whole = set.intersection(*map(set, self._rows.values()))
        for step in sorted(whole):
            self._compare({rank: kept[step] for rank, kept in self._rows.items()})
        if whole:
            last = max(whole)
            for rank, kept in self._rows.items():
                self._rows[rank] = {step: row for step, row in kept.items() if step > last}
        return self.slow

    def _compare(self, step: Mapping[int, StepRow]) -> None:
        span = median(row.span for row in step.values())
        for name, comparison in self._comparisons.items():
            figures = {rank: float(getattr(row, name)) for rank, row in step.items()}
            if name != "save" or all(figures.values()):
                comparison.add(figures, span)
        self._compare_links(step, span)
        slow: dict[tuple[int, str], float] = {}
        for name, comparison in self._comparisons.items():
            what = "compute" if name in ("cpu", "wall") else name
            for rank, factor in comparison.slow.items():
                slow[rank, what] = max(factor, slow.get((rank, what), 0.0))
        for (rank, peer), link in self._links.items():
            slow.update(((rank, f"link to rank {peer}"), f) for f in link.slow.values())
        self.slow = [SlowRank(rank, what, factor) for (rank, what), factor in slow.items()]

    def _compare_links(self, step: Mapping[int, StepRow], span: float) -> None:
        """Compares the links whose both ends waited, both ways together: clocks may differ."""
        ways = {
            (source, rank): moment - _moments(step[source].sent)[rank]
            for rank, row in step.items()
            for source, moment in _moments(row.taken).items()
            if source in step and rank in _moments(step[source].sent)
        }
        self._spans.append(span)
        doubt = max(0.0, abs(math.log(span / median(self._spans))) - _STEADY)
        for rank, peer in ways:
            if rank < peer and (peer, rank) in ways:
                both = ways[rank, peer] + ways[peer, rank]
                link = self._links.setdefault((rank, peer), StepComparison({rank: []}, True))
                link.add({rank: both}, span, doubt)


def _moments(pairs: Sequence[float]) -> dict[int, float]:
    return {int(rank): moment for rank, moment in zip(pairs[::2], pairs[1::2])}
