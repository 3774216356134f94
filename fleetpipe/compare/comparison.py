"""Aligns two trails, and names the first event that differs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from fleetpipe.compare.rounding import ROUNDING
from fleetpipe.compare.trail import BEGIN, CallRecord, Summary

#: Of any event after the first that differs: the steps of an optimizer make rounding larger.
_GROWN = 1e-3

Ranks = Sequence[Sequence[CallRecord]]


class TrailDifference(NamedTuple):
    """Where two trails are apart.

    Attributes:
        what: The event, and what of it; where the calls are others, what stands in its place.
        line: The line of the script.
        apart: The relative difference; infinite where shape, dtype or kind differ.
    """

    what: str
    line: str
    apart: float

    def __str__(self) -> str:
        size = "" if math.isinf(self.apart) else f" by {self.apart:.1e} relative"
        return f"{self.what}{size} ({self.line})"


class TrailComparison(NamedTuple):
    """The result for two trails.

    Attributes:
        steps: Training steps that were compared.
        calls: Calls that were compared.
        first: The first event that differs; None if no bit does.
        worst: The largest difference of all events.
    """

    steps: int
    calls: int
    first: TrailDifference | None
    worst: float

    @property
    def rounding(self) -> bool:
        """Whether they differ, by no more than the order of sums explains."""
        first = self.first
        return first is not None and first.apart <= ROUNDING and self.worst <= _GROWN


def unseeded(expected: Ranks, again: Ranks) -> frozenset[str]:
    """Returns the names of the random generators that a script does not seed.

    Args:
        expected: The events of a run.
        again: Those of another that ran the same way.
    """
    one, other = (_merged(_at(ranks, 0), "around") for ranks in (expected, again))
    return frozenset(name for name in one if name in other and _apart(one[name], other[name]))


def compare(expected: Ranks, got: Ranks, but: Collection[str] = ()) -> TrailComparison:
    """Compares two runs call by call.

    Values that a run has on some ranks alone are compared where they are.

    Args:
        expected: The events of each rank of one run.
        got: Those of the other.
        but: What stands around calls and is not compared.
    """
    first: TrailDifference | None = None
    worst, steps, calls = 0.0, 0, 0
    length = max(len(events) for events in (*expected, *got))
    for index in range(length):
        pair = _at(expected, index), _at(got, index)
        for finding in _differences(*pair, but):
            first, worst = first or finding, max(worst, finding.apart)
        if math.isinf(worst):
            break
        calls, steps = index + 1, steps + pair[0][0].trains
    return TrailComparison(steps, calls, first, worst)


def _at(ranks: Ranks, index: int) -> list[CallRecord]:
    """Returns the event of each rank that has so many."""
    return [events[index] for events in ranks if index < len(events)]


def _differences(
    expected: list[CallRecord], got: list[CallRecord], but: Collection[str]
) -> Iterator[TrailDifference]:
    """Yields the differences of one call, those first that are the cause of the others."""
    shown = (expected or got)[0]
    where = shown.call if shown.call == BEGIN else f"{shown.call} after {shown.steps} steps"
    calls = {one.call for one in (*expected, *got)}
    if not expected or not got or len(calls) > 1:
        instead = " and ".join(sorted(calls)) if len(calls) > 1 else "nothing"
        yield TrailDifference(f"{where}: the other run calls {instead}", shown.line, math.inf)
        return
    for of in ("around", "values", "state"):
        one, other = _merged(expected, of), _merged(got, of)
        # A rank may lack a result; what it holds of the model is there on one of them.
        names = {**one, **other} if of == "state" else [n for n in one if n in other]
        for name in (name for name in names if name not in but):
            apart = _apart(one.get(name, []), other.get(name, []))
            if apart:
                yield TrailDifference(f"{_named(of, name)} of {where} differs", shown.line, apart)


def _named(of: str, name: str) -> str:
    return {"around": name, "values": f"result{name}", "state": f"state {name}"}[of]


def _merged(events: Sequence[CallRecord], of: str) -> dict[str, list[Summary]]:
    """Returns what the ranks have, by name; equal ones once."""
    merged: dict[str, list[Summary]] = {}
    for event in events:
        part: Mapping[str, Summary] = getattr(event, of)
        for name, summary in part.items():
            if summary not in merged.setdefault(name, []):
                merged[name].append(summary)
    return merged


def _apart(expected: Sequence[Summary], got: Sequence[Summary]) -> float:
    """Returns the largest difference of any that one run has from the nearest of the other."""
    if not expected or not got:
        return math.inf
    return max(
        *(min(one.apart(other) for other in got) for one in expected),
        *(min(one.apart(other) for one in expected) for other in got),
    )
