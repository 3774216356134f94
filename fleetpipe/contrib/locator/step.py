"""One step of a job beside that of its twin: what every check of it needs.

A difference counts if it is larger than the effect of a change in the last place: the twin runs a
second time with each number of its weights, data and gradients changed by at most one unit, and the
difference at a place is the effect of rounding there, for any operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from fleetpipe.compare.differences import gap, unit_of
from fleetpipe.compare.rounding import MARGIN
from fleetpipe.contrib.locator.causes import Location
from fleetpipe.contrib.locator.layouts import parts_of
from fleetpipe.contrib.locator.record import READ_ON, Meaning, Record
from fleetpipe.mesh.causes import axis_between

#: Of a tensor of the twin: its phase, name, part and call.
Key = tuple[str, str, str, int]


class Tolerances:
    """The differences that rounding may cause at each place, as measured."""

    def __init__(self, twin: Record, perturbed: Record | None) -> None:
        """Compares a twin with its perturbed run; None: bits must be equal."""
        #: By place, the steps and what was measured in each.
        self._measured: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
        self._exact = perturbed is None
        if perturbed is None:
            return
        (rank,), (other,) = twin.ranks, perturbed.ranks
        for place, tensor in rank.tensors.items():
            moved = other.tensors.get(place)
            if moved is not None and tensor.dtype.kind == "f":
                measured = place.step, min(gap(moved, tensor), 1.0)
                self._measured[key_of(place)[:3]].append(measured)

    def at(self, place: Meaning, dtype: np.dtype[np.generic]) -> float:
        """Returns the largest allowed relative difference at a place, in any micro-batch."""
        if self._exact or dtype.kind != "f":
            return 0.0
        # One place for all micro-batches: a sample of one number says little. And what comes
        # after a bug may be anything: a step is measured by those up to it.
        samples = self._measured[key_of(place)[:3]]
        sizes = [size for step, size in samples if step <= place.step]
        return MARGIN * max([unit_of(dtype), *sizes])


class StepBesideTwin:
    """One step of a job and of its twin.

    Attributes:
        job: The tensors of the job's ranks.
        twin: The tensors of one device.
        number: The number of the step.
        ranks: The job's ranks by number.
        degrees: The degrees of the axes that are split.
        scales: The factors by which a rank's loss, or gradient, may rightly be larger before ranks
            average it.
        reads_on: Whether the twin has read the samples of several replicas one after another.
        positions: When the twin first computed a tensor, for any micro-batch.
    """

    def __init__(self, job: Record, twin: Record, tolerances: Tolerances, number: int) -> None:
        self.job, self.number, self._tolerances = job, number, tolerances
        (self.twin,) = twin.ranks
        self.ranks = {rank.rank: rank for rank in job.ranks}
        self.degrees = job.degrees
        self.reads_on = self.place("data", part=READ_ON) in self.twin.tensors
        parts = [self.degrees.get(axis, 1) for axis in ("dp", "sharding", "sep", "cp", "ep")]
        self.scales = sorted({1, *parts, int(np.prod(parts[:2])), int(np.prod(parts[:4]))})
        self.positions: dict[Key, int] = {}
        for position, place in enumerate(self.twin.tensors):
            if place.step == number:
                self.positions.setdefault(key_of(place), position)

    def place(self, phase: str, name: str = "", part: str = "", micro_batch: int = -1) -> Meaning:
        """Returns the place of a tensor of this step."""
        return Meaning(self.number, phase, name, micro_batch, part)

    def tolerance(self, place: Meaning, tensor: np.ndarray) -> float:
        """Returns the largest relative difference of a tensor at a place that is rounding."""
        return self._tolerances.at(place, tensor.dtype)

    def parts_of(
        self, whole: np.ndarray, shape: tuple[int, ...], rank: int
    ) -> Iterator[np.ndarray]:
        """Yields the possible parts of a tensor that a rank has, by the shape of its part."""
        return parts_of(whole, shape, self.ranks[rank].coordinate, self.degrees)

    def members(self, rank: int, axes: Iterable[str], of: Iterable[int]) -> list[int]:
        """Returns the ranks of ``of`` that differ from one along some axes only."""
        anywhere = dict.fromkeys(axes, 0)
        here = {**self.ranks[rank].coordinate, **anywhere}
        return [n for n in of if {**self.ranks[n].coordinate, **anywhere} == here]

    def axis_of(self, wrong: Iterable[int], of: Iterable[int]) -> str:
        """Returns an axis whose place decides which ranks of ``of`` are wrong; "" if none does."""
        places = {number: self.ranks[number].coordinate for number in of}
        return axis_between(places, {*wrong}, self.degrees)

    def split(self, *axes: str) -> str:
        """Returns the first of some axes that is split; "" if none is."""
        return next((axis for axis in axes if self.degrees.get(axis, 1) > 1), "")

    def location(
        self,
        layer: str,
        phase: str,
        ranks: Iterable[int],
        cause: str,
        axis: str = "",
        micro_batch: int | None = None,
        difference: float = float("inf"),
        tolerance: float = 0.0,
    ) -> Location:
        """Describes a place of this step."""
        place = layer, phase, axis, sorted({*ranks}), self.number, micro_batch
        return Location(*place, difference, tolerance, cause)


def key_of(place: Meaning) -> Key:
    """Returns a place without its step and micro-batch."""
    return place.phase, place.name, place.part, place.call
