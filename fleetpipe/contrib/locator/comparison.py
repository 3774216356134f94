"""Compares the phases of each step and returns the first place that differs."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from fleetpipe.contrib.locator import causes
from fleetpipe.contrib.locator.causes import Location, Outcome, axis_between, first_split
from fleetpipe.contrib.locator.layouts import parts_of
from fleetpipe.contrib.locator.parameters import ParameterChecks
from fleetpipe.contrib.locator.record import (
    DROPPED,
    READ_ON,
    Meaning,
    RankTensors,
    Record,
    ratio_of,
    shares_by_place,
    shares_of,
)
from fleetpipe.contrib.locator.rows import OTHER, Matched, SampleRows, gather, is_sample, match
from fleetpipe.contrib.locator.tolerance import Tolerances, gap, largest
from fleetpipe.errors import UsageError
from fleetpipe.mesh.causes import STREAMS


def first_difference(job: Record, twin: Record, perturbed: Record | None = None) -> Location | None:
    """Returns the first place where a job differs from its twin by more than rounding.

    Args:
        job: The tensors of the job's ranks.
        twin: The tensors of one device.
        perturbed: The same with numbers changed in the last place; None: any different bit counts.
    """
    tolerances = Tolerances(twin, perturbed)
    for step in range(min(job.steps, twin.steps)):
        finding = StepBesideTwin(job, twin, tolerances, step).first()
        if finding is not None:
            return finding
    return None


class StepBesideTwin:
    """Compares one step of a job with the twin's."""

    def __init__(self, job: Record, twin: Record, tolerances: Tolerances, step: int) -> None:
        """Matches the samples of the replicas with the twin's."""
        self.job, self.tolerances, self.step = job, tolerances, step
        #: What adds up to the right value, and nothing right was made of it yet.
        self._waiting: list[Outcome] | None = None
        (self.single,) = twin.ranks
        self.matched: Matched = match(job, twin, step)
        self._by_call: dict[tuple[str, str, str, int], dict[int, np.ndarray]] = defaultdict(dict)
        self.positions: dict[tuple[str, str, str], float] = {}
        self._when: dict[tuple[str, str, str, int], float] = {}
        self._calls: dict[tuple[str, str], int] = {}
        for number, (p, tensor) in enumerate(self.single.tensors.items()):
            if p.step == step:
                self._by_call[p.phase, p.name, p.part, p.call][p.micro_batch] = tensor
                self.positions.setdefault((p.phase, p.name, p.part), number)
                self._when.setdefault((p.phase, p.name, p.part, p.call), number)
                if p.phase == "forward":
                    calls = max(self._calls.get((p.name, p.part), 0), p.call + 1)
                    self._calls[p.name, p.part] = calls
        #: By layer and call, where what it takes comes from.
        self._sources = {
            (p.name, p.call): sources
            for p, sources in self.single.sources.items()
            if p.step == step and p.part == "output 0"
        }
        self._own_calls = {rank.rank: _calls_of(rank, step) for rank in job.ranks}
        self._micro_batches = 1 + max(p.micro_batch for r in job.ranks for p in r.tensors)
        inputs = [t for p, t in self.single.of(step, "data").items() if t.ndim]
        self._counts = len(inputs[0]) if inputs else 1
        axes = ("dp", "sharding", "sep", "cp", "ep")
        parts = [self.job.degrees.get(axis, 1) for axis in axes]
        #: By how much a rank's loss, or gradient, may rightly be larger: what ranks average later.
        self.scales = sorted({1, *parts, int(np.prod(parts[:2])), int(np.prod(parts[:4]))})

    def first(self) -> Location | None:
        """Returns the first place that differs in this step."""
        parameters = ParameterChecks(
            self.job, self.single, self.tolerances, self.step, self.scales, self.positions
        )
        checks: list[Callable[[], Location | None]] = [
            parameters.initial,
            lambda: causes.of_evaluation(self.job, self.step),
            self._data,
            lambda: self._flow("forward"),
            self._streams,
            self._loss,
            parameters.cleared,
            lambda: self._backward(parameters),
            parameters.reduction,
            parameters.trained,
            parameters.clip,
            parameters.optimizer_input,
            parameters.update,
            parameters.buffers,
        ]
        return next((finding for check in checks if (finding := check()) is not None), None)

    # What flows through layers

    def outcomes(self, phase: str) -> Iterator[Outcome]:
        """Compares the inputs, outputs or gradients of layers on all ranks."""
        for rank in self.job.ranks:
            for place, tensor in rank.of(self.step, phase).items():
                if place.micro_batch >= 0 and (place.name or phase == "data"):
                    outcome = self._outcome(rank, place, tensor)
                    if outcome is not None:
                        yield outcome

    def expected(self, rank: RankTensors, place: Meaning, size: int) -> list[np.ndarray]:
        """Returns the twin's tensors for a micro-batch of a rank, for each call that may match."""
        calls = self._calls.get((place.name, place.part), 1)
        here = self._own_calls[rank.rank][place.name, place.part, place.micro_batch]
        numbers = [place.call] if here in (0, calls) else range(calls)
        rows = self._rows_of(rank, place.micro_batch)
        parts = any(self.job.degrees.get(axis, 1) > 1 for axis in ("mp", "sep", "cp", "ep"))
        if place.name and size == 1 and (parts or rows.whole is None):
            # One number is made of all rows that a rank has, and of no others.
            return []
        keys = [self._key(place, n) for n in numbers]
        wholes = [gather(rows, self._by_call[key], self._counts) for key in keys]
        return list(itertools.chain.from_iterable(wholes))

    def _key(self, place: Meaning, call: int) -> tuple[str, str, str, int]:
        """Returns the place of the twin's tensor: an input may be another layer's output."""
        key = place.phase, place.name, place.part, call
        sources = self._sources.get((place.name, call), [])
        # Of several it is not known which is meant.
        if place.part == "input 0" and len(sources) == 1 and key not in self._by_call:
            return sources[0].phase, sources[0].name, sources[0].part, sources[0].call
        return key

    def _rows_of(self, rank: RankTensors, micro_batch: int) -> SampleRows:
        rows = self.matched.rows.get((self.job.replica(rank), micro_batch))
        if rows is not None:
            return rows
        return SampleRows((), self.job.replica(rank) * self._micro_batches + micro_batch)

    def _parts(
        self, whole: np.ndarray, rank: RankTensors, shape: tuple[int, ...]
    ) -> Iterator[np.ndarray]:
        return parts_of(whole, shape, rank.coordinate, self.job.degrees)

    def _outcome(self, rank: RankTensors, place: Meaning, tensor: np.ndarray) -> Outcome | None:
        wholes = self.expected(rank, place, tensor.size)
        scale = max(map(largest, wholes), default=0.0)
        scales = self.scales if place.phase == "gradient" else [1]
        gaps = [
            gap(tensor / n if n > 1 else tensor, part, scale)
            for whole in wholes
            for part in self._parts(whole, rank, tensor.shape)
            for n in scales
        ]
        if not gaps:
            return None
        key = self._key(place, place.call)
        # What was done to a value on its way comes after it.
        position = self._when.get(key, 0.0) + 0.5 * (key[1] != place.name)
        tolerance = self.tolerances.at(place, tensor.dtype)
        outcome = Outcome(rank, place, position, min(gaps), tolerance)
        if outcome.right or place.phase == "data":
            return outcome
        return outcome._replace(partial=self._partial(rank, place, wholes, scale, tolerance))

    def _partial(
        self,
        rank: RankTensors,
        place: Meaning,
        wholes: list[np.ndarray],
        scale: float,
        tolerance: float,
    ) -> str:
        for axis in ("mp", "ep", "sep", "cp"):
            if self.job.degrees.get(axis, 1) == 1:
                continue
            members = [r for r in self.job.ranks if _beside(r, rank, axis)]
            tensors = [r.tensors[place] for r in members if place in r.tensors]
            if len(tensors) < 2 or len({t.shape for t in tensors}) > 1:
                continue
            total = np.sum([t.astype("float64") for t in tensors], axis=0)
            for n in self.scales if place.phase == "gradient" else [1]:
                for whole in wholes:
                    for part in self._parts(whole, rank, total.shape):
                        if gap(total / n, part.astype("float64"), scale) <= tolerance:
                            return axis
        return ""

    def _flow(self, phase: str) -> Location | None:
        wrong = self.wrong(list(self.outcomes(phase)))
        return None if wrong is None else self._describe(wrong)

    def _describe(self, wrong: list[Outcome]) -> Location:
        location = causes.of_flow(self.job.degrees, self.step, self.consumer, wrong)
        rank, micro_batch = wrong[0].rank, wrong[0].place.micro_batch
        rows = self._rows_of(rank, micro_batch)
        if location.phase != "forward" or not rows.places or rows.whole is not None:
            return location
        axis = location.axis or first_split(self.job.degrees, "dp", "sharding")
        return location._replace(axis=axis, cause=causes.OTHER_ROWS)

    def wrong(self, outcomes: list[Outcome]) -> list[Outcome] | None:
        """Returns the outcomes of the first place that is wrong on some rank.

        A value whose parts sum to the right one may be summed later. It is to blame if the next
        difference is in a value computed from it.
        """
        grouped: dict[tuple[int, float, Meaning], list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            key = outcome.place.micro_batch, outcome.position, outcome.place
            grouped[key].append(outcome)
        self._waiting = None
        for key in sorted(grouped):
            here = grouped[key]
            if all(outcome.right for outcome in here):
                if not key[2].part.startswith("input"):
                    self._waiting = None
            elif all(outcome.right or outcome.partial for outcome in here):
                self._waiting = self._waiting or here
            else:
                return self._waiting or here
        return None

    def _streams(self) -> Location | None:
        """Finds ranks whose dropouts drew the same numbers for different values."""
        seen: dict[Meaning, list[tuple[RankTensors, np.ndarray]]] = defaultdict(list)
        for rank in self.job.ranks:
            for place, mask in rank.of(self.step, "forward").items():
                if place.part == "mask" and mask.size > 32 and not mask.all():
                    seen[place].append((rank, mask))
        for place, masks in seen.items():
            for (one, mask), (other, same) in itertools.combinations(masks, 2):
                axis = axis_between([one], [other], self.job.degrees)
                values = place._replace(part=DROPPED)
                if axis in ("", "pp", "ep") or mask.tobytes() != same.tobytes():
                    continue
                if axis in ("mp", "sep", "cp") and self._are_alike(one, other, values):
                    continue
                numbers, k = [one.rank, other.rank], place.micro_batch
                cause = STREAMS.format(axis)
                return Location(place.name, "forward", axis, numbers, self.step, k, 1.0, 0.0, cause)
        return None

    def _are_alike(self, one: RankTensors, other: RankTensors, place: Meaning) -> bool:
        """Whether two ranks have the same values before a dropout."""
        value, copy = one.tensors.get(place), other.tensors.get(place)
        if value is None or copy is None:
            return True
        return gap(value, copy) <= 1e-3

    # Data and loss

    def _data(self) -> Location | None:
        if self.matched.wrong is not None:
            what, replica = self.matched.wrong
            read_on = Meaning(self.step, "data", "", part=READ_ON)
            if what == OTHER and read_on in self.single.tensors:
                raise _cut_by_the_script(replica, self.step)
            ranks = [r for r in self.job.ranks if self.job.replica(r) == replica]
            rest = [r for r in self.job.ranks if self.job.replica(r) != replica]
            axis = axis_between(ranks, rest, self.job.degrees)
            return self._finding("", "data", axis, ranks, 0, causes.of_data(what, replica))
        wrong = [o for o in self.outcomes("data") if not o.right and o.place.part != "input"]
        labels = [o for o in wrong if o.place.part.startswith("label") and self._is_sample(o)]
        if not labels:
            return None
        first = min(o.place.micro_batch for o in labels)
        ranks = [o.rank for o in labels if o.place.micro_batch == first]
        rest = [r for r in self.job.ranks if r not in ranks]
        axis = axis_between(ranks, rest, self.job.degrees)
        split = next((a for a in ("sep", "cp") if self.job.degrees.get(a, 1) > 1), "")
        cause = causes.LABELS if axis or not split else causes.LABELS_OF_PARTS
        return self._finding("", "data", axis or split, ranks, first, cause)

    def _is_sample(self, outcome: Outcome) -> bool:
        places = self.single.of(self.step, "data").items()
        wholes = [tensor for place, tensor in places if place.part == outcome.place.part]
        return is_sample(outcome.rank.tensors[outcome.place], wholes)

    def _finding(
        self, layer: str, phase: str, axis: str, ranks: list[RankTensors], k: int | None, cause: str
    ) -> Location:
        numbers = sorted({rank.rank for rank in ranks})
        return Location(layer, phase, axis, numbers, self.step, k, float("inf"), 0.0, cause)

    def _loss(self) -> Location | None:
        shares = shares_by_place(self.job, self.step)
        expected = shares_of(self.single, self.step)
        if shares and expected:
            place = Meaning(self.step, "loss", "", 0, "share")
            tolerance = self.tolerances.at(place, np.dtype("float32"))
            ratio = ratio_of(shares, expected)
            off = min(abs(ratio / n - 1) for n in self.scales)
            if not off <= tolerance and not self._has_parts(ratio, expected, tolerance):
                if self._waiting is not None:
                    return self._describe(self._waiting)
                return causes.of_loss(self.job, self.step, shares, expected, ratio, off, tolerance)
        return self._compare_losses()

    def _has_parts(self, ratio: float, expected: dict[int, float], tolerance: float) -> bool:
        """Whether each member along mp has the loss of other tokens, which sum to the twin's."""
        members = self.job.degrees.get("mp", 1)
        total = ratio_of(shares_by_place(self.job, self.step, "mp"), expected)
        apart = abs(total - members * ratio) > tolerance * abs(total)
        ways = (k * n for k in (1, members) for n in self.scales)
        return apart and min(abs(total / n - 1) for n in ways) <= tolerance

    def _compare_losses(self) -> Location | None:
        """Compares the losses that ``train_batch`` returned."""
        place = Meaning(self.step, "loss", "", part="returned 0")
        value = self.single.tensors.get(place)
        if value is None:
            return None
        tolerance = self.tolerances.at(place, value.dtype)
        gaps = {r: gap(r.tensors[place], value) for r in self.job.ranks if place in r.tensors}
        bad = [rank for rank, apart in gaps.items() if not apart <= tolerance]
        if not bad:
            return None
        axis = axis_between(bad, [r for r in gaps if r not in bad], self.job.degrees)
        axis = axis or first_split(self.job.degrees, "dp", "sharding")
        numbers = sorted(rank.rank for rank in bad)
        worst = max(gaps.values())
        return Location(
            "", "loss", axis, numbers, self.step, None, worst, tolerance, causes.RETURNED
        )

    # Backward

    def _backward(self, parameters: ParameterChecks) -> Location | None:
        outcomes = [o for o in self.outcomes("gradient") if o.place.part.startswith("output")]
        # By layer, as backward goes; then by micro-batch.
        ordered = [
            o._replace(place=o.place._replace(step=o.place.micro_batch, micro_batch=0))
            for o in outcomes
        ]
        wrong = self.wrong(ordered)
        first = parameters.gradient()
        if wrong is None and first is not None:
            wrong = self._waiting
        if wrong is not None and (first is None or wrong[0].position < first[0]):
            restored = [
                o._replace(place=o.place._replace(step=self.step, micro_batch=o.place.step))
                for o in wrong
            ]
            return self._describe(restored)
        if first is None:
            return None
        finding = first[1]
        if causes.NO_GRADIENT in finding.cause:
            return finding._replace(layer=self._stopping() or finding.layer)
        if wrong is None and parameters.most_gradients_wrong:
            return finding._replace(layer="", cause=causes.ACCUMULATED)
        return finding

    def consumer(self, place: Meaning) -> str:
        """Returns the innermost layer that takes a layer's output; "" if none does."""
        return max(self._consumers(place), key=lambda name: name.count("."), default="")

    def _consumers(self, place: Meaning) -> list[str]:
        key = place.name, place.part
        return [
            user.name
            for user, sources in self.single.sources.items()
            if user.step == self.step and any((s.name, s.part) == key for s in sources)
        ]

    def _stopping(self) -> str:
        """Returns the outermost layer that gives its inputs no gradient; "" if none."""
        ran, arrived = (
            {(p.name, p.part) for r in self.job.ranks for p in r.of(self.step, phase)}
            for phase in ("forward", "gradient")
        )
        for place in self.single.of(self.step, "gradient"):
            if (place.name, place.part) in ran - arrived:
                users = self._consumers(place) or [place.name]
                return min(users, key=lambda name: name.count("."))
        return ""


def _cut_by_the_script(replica: int, step: int) -> UsageError:
    return UsageError(
        f"the samples of replica {replica} cannot be compared with those of one device",
        where=f"step {step}, a loop without train_batch",
        cause="the script cuts them by a number of replicas that it does not ask Fleet for, so "
        "that on one device it reads those of one replica; or the sampler is wrong",
        fix="say how it runs on one device, with --twin NAME=VALUE or --twin-arguments",
    )


def _calls_of(rank: RankTensors, step: int) -> Counter[tuple[str, str, int]]:
    """Counts the calls of each layer in each micro-batch."""
    places = (p for p in rank.tensors if p.step == step and p.phase == "forward")
    return Counter((p.name, p.part, p.micro_batch) for p in places)


def _beside(one: RankTensors, other: RankTensors, axis: str) -> bool:
    places = {**one.coordinate, axis: 0}
    return places == {**other.coordinate, axis: 0}
