"""Compares samples, the outputs of layers and their gradients in a step of a job and of its twin.

A difference counts if it is larger than the effect of rounding (``Tolerances``): the twin runs a
second time with each number of its weights, data and gradients changed by at most one unit in the
last place, and how much a tensor changes by that is the effect of rounding there.
``StepBesideTwin`` has the records of one step, and ``Flow`` compares them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fleetpipe.compare.differences import MARGIN, gap, largest_of, unit_of
from fleetpipe.contrib import locator
from fleetpipe.contrib.locator import Location
from fleetpipe.contrib.locator.layouts import Matched, SampleRows, gather, parts_of
from fleetpipe.contrib.locator.record import READ_ON, Meaning, RankTensors, Record
from fleetpipe.mesh.axes import axis_between

#: The phase, name, part and call of a tensor of the twin.
Key = tuple[str, str, str, int]

#: Axes whose ranks have shards of one tensor, or summands of it.
_PARTED = ("mp", "ep", "sep", "cp")


class Tolerances:
    """The differences that rounding may cause at each place, as measured."""

    def __init__(self, twin: Record, perturbed: Record | None) -> None:
        """Compares a twin with its perturbed run; None: bits must be equal."""
        #: By phase, name and part: the step and the relative change in it.
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
        # The changes in all micro-batches count, since a single one may be small by chance. Those
        # of later steps do not: after a fault they may have any size.
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
        scales: The factors by which a rank's loss or gradient may be larger before ranks average
            it, without a fault.
        reads_on: Whether the twin has read the samples of several replicas one after another.
        positions: By key the position of the tensor in the order in which the twin computes them.
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
        """Returns the relative difference of a tensor that rounding may cause at a place."""
        return self._tolerances.at(place, tensor.dtype)

    def parts_of(
        self, whole: np.ndarray, shape: tuple[int, ...], rank: int
    ) -> Iterator[np.ndarray]:
        """Yields the possible shards of a full tensor that a rank has, from its shard's shape."""
        return parts_of(whole, shape, self.ranks[rank].coordinate, self.degrees)

    def members(self, rank: int, axes: Iterable[str], of: Iterable[int]) -> list[int]:
        """Returns the ranks of ``of`` with the coordinates of ``rank`` on all other axes."""
        anywhere = dict.fromkeys(axes, 0)
        here = {**self.ranks[rank].coordinate, **anywhere}
        return [n for n in of if {**self.ranks[n].coordinate, **anywhere} == here]

    def axis_of(self, wrong: Iterable[int], of: Iterable[int]) -> str:
        """Returns an axis whose coordinate decides which ranks of ``of`` are wrong, or ""."""
        places = {number: self.ranks[number].coordinate for number in of}
        return axis_between(places, {*wrong}, self.degrees)

    def split(self, *axes: str) -> str:
        """Returns the first of some axes with a degree above 1; "" if there is none."""
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


class Outcome(NamedTuple):
    """The comparison of one tensor of one rank with the twin's.

    Attributes:
        rank: The rank.
        place: The place of the tensor.
        position: The position of the twin's tensor in the order in which the twin computes them.
        gap: The relative difference between the two.
        tolerance: The difference that rounding may cause.
        partial: The axis along which the ranks' tensors sum to the twin's; "" if they do not.
    """

    rank: RankTensors
    place: Meaning
    position: float
    gap: float
    tolerance: float
    partial: str = ""

    @property
    def right(self) -> bool:
        """Whether it agrees with the twin's."""
        return self.gap <= self.tolerance


class Flow:
    """The tensors between the layers of a step.

    Attributes:
        rows: The number of rows of a micro-batch of the twin.
        waiting: The outcomes of the last tensor whose ranks' values only add up to the right one,
            until a right tensor follows.
    """

    def __init__(self, step: StepBesideTwin, matched: Matched) -> None:
        """Takes the places of the job's samples in the twin's data."""
        self._at, self._matched = step, matched
        self.waiting: list[Outcome] | None = None
        self._by_key: dict[Key, dict[int, np.ndarray]] = defaultdict(dict)
        self._calls: Counter[tuple[str, str]] = Counter()
        for place, tensor in step.twin.tensors.items():
            if place.step == step.number:
                self._by_key[key_of(place)][place.micro_batch] = tensor
        for phase, name, part, call in self._by_key:
            if phase == "forward":
                self._calls[name, part] = max(self._calls[name, part], call + 1)
        self._sources = {p: s for p, s in step.twin.sources.items() if p.step == step.number}
        #: By layer and call the meanings of the tensors that are its inputs.
        self._inputs = {
            (p.name, p.call): s for p, s in self._sources.items() if p.part == "output 0"
        }
        self._own_calls = {
            rank.rank: Counter(
                (p.name, p.part, p.micro_batch) for p in rank.of(step.number, "forward")
            )
            for rank in step.job.ranks
        }
        self._micro_batches = 1 + max(p.micro_batch for r in step.job.ranks for p in r.tensors)
        inputs = [t for t in step.twin.of(step.number, "data").values() if t.ndim]
        self.rows = len(inputs[0]) if inputs else 1

    def first(self, phase: str) -> Location | None:
        """Returns the first wrong input or output of a layer."""
        wrong = self.wrong(self.outcomes(phase))
        return None if wrong is None else self.describe(wrong)

    def outcomes(self, phase: str) -> Iterator[Outcome]:
        """Compares samples, or the inputs, outputs or gradients of layers, on all ranks."""
        for rank in self._at.job.ranks:
            for place, tensor in rank.of(self._at.number, phase).items():
                if place.micro_batch >= 0 and (place.name or phase == "data"):
                    outcome = self._outcome(rank, place, tensor)
                    if outcome is not None:
                        yield outcome

    def wrong(self, outcomes: Iterable[Outcome], backward: bool = False) -> list[Outcome] | None:
        """Returns the outcomes of the first place that is wrong on some rank.

        Values that add up to the right one over the ranks may be summed later. They are wrong if
        the next difference comes before a right tensor.

        Args:
            outcomes: The comparisons of all ranks.
            backward: Whether layers come first in the order, and micro-batches second.
        """
        grouped: dict[tuple[float, float, Meaning], list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            order = (float(outcome.place.micro_batch), outcome.position)
            first, second = order[::-1] if backward else order
            grouped[first, second, outcome.place].append(outcome)
        self.waiting = None
        for key in sorted(grouped):
            here = grouped[key]
            if all(outcome.right for outcome in here):
                if not key[2].part.startswith("input"):
                    self.waiting = None
            elif all(outcome.right or outcome.partial for outcome in here):
                self.waiting = self.waiting or here
            else:
                return self.waiting or here
        return None

    # One tensor

    def _outcome(self, rank: RankTensors, place: Meaning, tensor: np.ndarray) -> Outcome | None:
        wholes = self._of_twin(rank, place, tensor.size)
        scale = max(map(largest_of, wholes), default=0.0)
        apart = [gap(*pair, scale) for pair in self._pairs(rank, place, tensor, wholes)]
        if not apart:
            return None
        key = self._key(place, place.call)
        # An input may be another layer's output, and comes after it.
        position = self._at.positions.get(key, 0) + 0.5 * (key[1] != place.name)
        outcome = Outcome(rank, place, position, min(apart), self._at.tolerance(place, tensor))
        if outcome.right or place.phase == "data":
            return outcome
        for axis in _PARTED:
            members = self._at.members(rank.rank, (axis,), self._at.ranks)
            held = [self._at.ranks[n].tensors.get(place) for n in members]
            tensors = [t for t in held if t is not None]
            if len(tensors) > 1 and len({t.shape for t in tensors}) == 1:
                total = np.sum([t.astype("float64") for t in tensors], axis=0)
                pairs = self._pairs(rank, place, total, wholes)
                if any(gap(t, p.astype("float64"), scale) <= outcome.tolerance for t, p in pairs):
                    return outcome._replace(partial=axis)
        return outcome

    def _pairs(
        self, rank: RankTensors, place: Meaning, tensor: np.ndarray, wholes: list[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields a rank's tensor with each part of the twin's tensors that it may have to equal."""
        for whole in wholes:
            for part in self._at.parts_of(whole, tensor.shape, rank.rank):
                for n in self._at.scales if place.phase == "gradient" else [1]:
                    yield (tensor / n if n > 1 else tensor), part

    def _of_twin(self, rank: RankTensors, place: Meaning, size: int) -> list[np.ndarray]:
        """Returns the twin's tensors for a micro-batch of a rank, for each call that may match."""
        calls = max(self._calls[place.name, place.part], 1)
        here = self._own_calls[rank.rank][place.name, place.part, place.micro_batch]
        numbers = [place.call] if here in (0, calls) else range(calls)
        rows = self.rows_of(rank, place.micro_batch)
        if place.name and size == 1 and (self._at.split(*_PARTED) or rows.whole is None):
            # A single number depends on all rows of a micro-batch, and the rank has others.
            return []
        tensors = (self._by_key.get(self._key(place, n), {}) for n in numbers)
        wholes = [gather(rows, of_key, self.rows) for of_key in tensors]
        return list(itertools.chain.from_iterable(wholes))

    def _key(self, place: Meaning, call: int) -> Key:
        """Returns the key of the twin's tensor: an input may be another layer's output."""
        key = place.phase, place.name, place.part, call
        sources = self._inputs.get((place.name, call), [])
        # With several sources it is unknown which one the input is.
        if place.part == "input 0" and len(sources) == 1 and key not in self._by_key:
            return key_of(sources[0])
        return key

    def rows_of(self, rank: RankTensors, micro_batch: int) -> SampleRows:
        """Returns the twin's rows that a micro-batch of a rank has."""
        replica = self._at.job.replica(rank)
        unknown = SampleRows((), replica * self._micro_batches + micro_batch)
        return self._matched.rows.get((replica, micro_batch), unknown)

    # The cause

    def describe(self, wrong: list[Outcome]) -> Location:
        """Describes the outcomes of one place on all ranks."""
        at, bad = self._at, [outcome for outcome in wrong if not outcome.right]
        place, ranks = bad[0].place, [outcome.rank.rank for outcome in bad]
        partial = next((outcome.partial for outcome in bad if outcome.partial), "")
        axis = partial or at.axis_of(ranks, [outcome.rank.rank for outcome in wrong])
        axis = axis or at.split("mp", "sep", "cp", "ep")
        if place.phase == "gradient":
            layer, cause = self._of_gradient(bad[0], partial)
        else:
            layer, cause = self._of_value(place, partial, axis)
            rows = self.rows_of(bad[0].rank, place.micro_batch)
            if rows.places and rows.whole is None:
                axis, cause = axis or at.split("dp", "sharding"), locator.OTHER_ROWS
        worst = max(bad, key=lambda outcome: outcome.gap)
        measured = place.micro_batch, worst.gap, worst.tolerance
        return at.location(layer, place.phase, ranks, cause, axis, *measured)

    def _of_value(self, place: Meaning, partial: str, axis: str) -> tuple[str, str]:
        """Returns the layer to blame for a wrong value in forward, and the cause."""
        layer = place.name
        if place.part.startswith("input") and "." in layer:
            # The layer around computes an input that is no layer's output.
            layer = layer.rpartition(".")[0]
        if partial:
            return layer, locator.PARTIAL[partial]
        if place.part.startswith("input"):
            return layer, f"what {layer} computes between its layers, or was sent, is another value"
        along = f": see what it does along {axis}" if axis else " from the same input"
        return layer, f"this layer computes something else{along}"

    def _of_gradient(self, outcome: Outcome, partial: str) -> tuple[str, str]:
        """Returns the layer to blame for a wrong gradient of an output, and the cause."""
        place = outcome.place
        users = sorted(self._users(place), key=lambda name: name.count("."))
        layer = users[-1] if users else place.name
        if partial:
            return layer, f"a missing all-reduce over {partial} in backward, of what it takes"
        if not users:
            return layer, "what comes back to its output is wrong: see what is made of that later"
        if (detached := self._of_skip_connection(outcome, users)) is not None:
            return detached
        cause = f"the backward of {layer} gives a wrong gradient to what it takes"
        return layer, cause + (f", or another use of that in {users[0]}" if users[1:] else "")

    def _of_skip_connection(self, outcome: Outcome, users: list[str]) -> tuple[str, str] | None:
        """Finds a skip connection ``x + f(x)`` of which one summand gives no gradient back.

        Without a fault ``x`` gets the gradient of the sum unchanged, plus the one through ``f``.
        """
        rank, place, tensor = outcome.rank, outcome.place, outcome.rank.tensors[outcome.place]
        pairs = list(self._pairs(rank, place, tensor, self._of_twin(rank, place, tensor.size)))
        if not tensor.any():
            return None
        matching: dict[str, str] = {}
        for key in self._by_key:
            if key[0] != "gradient" or self._at.positions[key] >= outcome.position:
                continue
            other = Meaning(self._at.number, *key[:2], place.micro_batch, *key[2:])
            sums = self._of_twin(rank, other, tensor.size) if key[2].startswith("output") else []
            for (ours, whole), of_sum in itertools.product(pairs, sums):
                scale = largest_of(whole)
                if gap(whole - ours, of_sum, scale) <= outcome.tolerance:
                    matching[key[1]] = locator.DETACHED_SKIP
                elif gap(ours, of_sum, scale) <= outcome.tolerance:
                    matching[key[1]] = locator.DETACHED_BRANCH
        layer = min(matching, key=lambda name: (name not in users, name.count(".")), default=None)
        return None if layer is None else (layer, matching[layer])

    def _users(self, place: Meaning) -> list[str]:
        """Returns the layers of the twin that take a layer's output as an input."""
        key = place.name, place.part
        return list(
            dict.fromkeys(
                user.name
                for user, sources in self._sources.items()
                if any((source.name, source.part) == key for source in sources)
            )
        )

    def stopping(self) -> str:
        """Returns the outermost layer that gives its inputs no gradient; "" if none."""
        ran, arrived = (
            {(p.name, p.part) for r in self._at.job.ranks for p in r.of(self._at.number, phase)}
            for phase in ("forward", "gradient")
        )
        for place in self._at.twin.of(self._at.number, "gradient"):
            if (place.name, place.part) in ran - arrived:
                users = self._users(place) or [place.name]
                return min(users, key=lambda name: name.count("."))
        return ""
