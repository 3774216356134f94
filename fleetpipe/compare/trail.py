"""The trail of a run: an event for each call of the script's, and where two of them part.

A rank writes ``rank-0.jsonl``, a line an event. A tensor stands there as its dtype and shape, a
digest of its bytes, its norm and some of its numbers, so that a difference of rounding can be told
from another number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.compare.differences import digest_of
from fleetpipe.compare.rounding import ROUNDING

#: Calls that train a step.
TRAINS = ("train_batch", "forward_backward_pipeline", "run")
#: Stands before the first call that trains a model.
BEGIN = "begin"
#: Numbers of a tensor that are written, evenly spaced.
_SAMPLES = 8
#: Of any event after the first that differs: the steps of an optimizer make rounding larger.
_GROWN = 1e-3


class Summary(NamedTuple):
    """What a trail has of a tensor or of a plain value.

    Attributes:
        kind: Its dtype and shape, or the type of a plain value.
        digest: A digest of its bytes.
        numbers: Its norm, a sum in which each number has a weight of its own, and some of its
            numbers; empty where these are no floats, which never differ by rounding.
    """

    kind: str
    digest: str
    numbers: tuple[float, ...] = ()

    @classmethod
    def of_bytes(cls, kind: str, content: bytes | np.ndarray) -> Summary:
        """Summarizes what has no numbers."""
        return cls(kind, digest_of(content))

    @classmethod
    def of_array(cls, kind: str, array: np.ndarray) -> Summary:
        """Summarizes an array, whose dtype and shape are ``kind``."""
        flat = np.ascontiguousarray(array).reshape(-1)
        summary = cls.of_bytes(kind, flat)
        if not flat.size or flat.dtype.kind != "f":
            return summary
        exact = flat.astype(np.float64)
        # What stands in another order has the same norm, and another sum.
        weighed = float(exact @ np.cos(np.arange(flat.size)))
        samples = exact[np.linspace(0, flat.size - 1, min(_SAMPLES, flat.size)).astype(int)]
        norm = math.sqrt(float(exact @ exact))
        return summary._replace(numbers=(norm, weighed, *samples.tolist()))

    @classmethod
    def of_plain(cls, value: Any) -> Summary:
        """Summarizes a number, a text or None."""
        return cls(type(value).__name__, repr(value), (value,) if isinstance(value, float) else ())

    def distance(self, other: Summary) -> float:
        """Returns how far two are apart: 0 for the same bits, else relative to the largest."""
        if self[:2] == other[:2]:
            return 0.0
        alike = self.kind == other.kind and len(self.numbers) == len(other.numbers)
        if not alike or not self.numbers:
            return math.inf
        here, there = np.array(self.numbers), np.array(other.numbers)
        if not (np.isfinite(here) == np.isfinite(there)).all():
            return math.inf
        both = np.isfinite(here)
        largest = max(np.abs(here[both]).max(initial=0), np.abs(there[both]).max(initial=0))
        # Where only numbers that are not written differ, they are as far apart as these can hide.
        return float(np.abs(here[both] - there[both]).max(initial=0) / (largest or 1)) or 1e-16


@dataclass(frozen=True)
class CallRecord:
    """One call, and how the run stood behind it.

    Attributes:
        call: What was called, as ``train_batch``; :data:`BEGIN` before the first that trains.
        line: The line of the script that called it.
        steps: Training steps so far, this one included.
        values: What it returned, by the path of each value.
        state: The model by fully qualified name, where the call trains.
        around: The learning rate, the rows that were given, the states of the random generators.
    """

    call: str
    line: str
    steps: int
    values: Mapping[str, Summary] = field(default_factory=dict)
    state: Mapping[str, Summary] = field(default_factory=dict)
    around: Mapping[str, Summary] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns a line of JSON."""
        return json.dumps(asdict(self))

    @property
    def trains(self) -> bool:
        """Whether it is a training step."""
        return self.call in TRAINS

    @classmethod
    def from_json(cls, text: str) -> CallRecord:
        """Returns the event of :meth:`to_json`."""
        raw = json.loads(text)
        for name in ("values", "state", "around"):
            raw[name] = {
                path: Summary(kind, digest, tuple(numbers))
                for path, (kind, digest, numbers) in raw[name].items()
            }
        return cls(**raw)


#: The events of each rank of a run.
Ranks = Sequence[Sequence[CallRecord]]


def file_of(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's trail."""
    return folder / f"rank-{rank}.jsonl"


def read(folder: Path) -> list[list[CallRecord]]:
    """Returns the events of each rank of a run."""
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.rpartition("-")[2]))
    lines_of_ranks = (file.read_text(encoding="utf-8").splitlines() for file in files)
    return [[*map(CallRecord.from_json, lines)] for lines in lines_of_ranks]


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
    one, other = (_merged(_events_at(ranks, 0), "around") for ranks in (expected, again))
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
        pair = _events_at(expected, index), _events_at(got, index)
        for finding in _differences(*pair, but):
            first, worst = first or finding, max(worst, finding.apart)
        if math.isinf(worst):
            break
        calls, steps = index + 1, steps + pair[0][0].trains
    return TrailComparison(steps, calls, first, worst)


def _events_at(ranks: Ranks, index: int) -> list[CallRecord]:
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
        *(min(one.distance(other) for other in got) for one in expected),
        *(min(one.distance(other) for one in expected) for other in got),
    )
