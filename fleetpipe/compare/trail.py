"""The trail of a run: an event for each call of the script's, in the order of the program.

A rank writes ``rank-0.jsonl``, a line an event. A tensor stands there as its dtype and shape, a
digest of its bytes, its norm and some of its numbers, so that a difference of rounding can be told
from another number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.compare.differences import digest_of

#: Calls that train a step.
TRAINS = ("train_batch", "forward_backward_pipeline", "run")
#: Stands before the first call that trains a model.
BEGIN = "begin"
#: Numbers of a tensor that are written, evenly spaced.
_SAMPLES = 8


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
    def of_bytes(cls, kind: str, content: bytes) -> Summary:
        """Summarizes what has no numbers."""
        return cls(kind, digest_of(content))

    @classmethod
    def of_array(cls, kind: str, array: np.ndarray) -> Summary:
        """Summarizes an array, whose dtype and shape are ``kind``."""
        flat = np.ascontiguousarray(array).reshape(-1)
        summary = cls.of_bytes(kind, flat.tobytes())
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

    def apart(self, other: Summary) -> float:
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
            raw[name] = {path: _summary(one) for path, one in raw[name].items()}
        return cls(**raw)


def _summary(raw: list[Any]) -> Summary:
    kind, digest, numbers = raw
    return Summary(kind, digest, tuple(numbers))


def file_of(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's trail."""
    return folder / f"rank-{rank}.jsonl"


def read(folder: Path) -> list[list[CallRecord]]:
    """Returns the events of each rank of a run."""
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.rpartition("-")[2]))
    return [list(_events(file)) for file in files]


def _events(file: Path) -> Iterator[CallRecord]:
    for line in file.read_text(encoding="utf-8").splitlines():
        yield CallRecord.from_json(line)
