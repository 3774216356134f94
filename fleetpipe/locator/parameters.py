"""What parameters are, get as gradients, and become: on every rank beside the twin."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.locator import causes
from fleetpipe.locator.causes import Location, axis_between, first_split
from fleetpipe.locator.layouts import layouts, part_of
from fleetpipe.locator.record import LEFT, Meaning, RankTensors, Record
from fleetpipe.locator.tolerance import Tolerances, gap, largest
from fleetpipe.mesh.causes import NORM, of_unequal

#: By rank.
Parts = dict[int, np.ndarray]


class Best(NamedTuple):
    """The nearest that ranks' gradients come to the twin's, where ranks may add them up.

    Attributes:
        apart: By rank, how far its sum is off.
        axes: Along which they are added up.
    """

    apart: dict[int, float]
    axes: tuple[str, ...]


class ParameterChecks:
    """The phases of a step that parameters go through."""

    def __init__(
        self,
        job: Record,
        single: RankTensors,
        tolerances: Tolerances,
        step: int,
        scales: Sequence[int],
        positions: Mapping[tuple[str, str, str], float],
    ) -> None:
        """Takes up a step.

        Args:
            job: What the ranks have computed.
            single: What the twin has.
            tolerances: What rounding does.
            step: The step.
            scales: By how much a gradient may rightly be larger before ranks average it.
            positions: When the twin has computed something.
        """
        self._job, self._single, self._tolerances = job, single, tolerances
        self._step, self._scales = step, scales
        self._ranks = {rank.rank: rank for rank in job.ranks}
        self._positions = positions
        self._local: dict[str, Best] = {}
        #: Whether gradients before the reduction are wrong for most parameters.
        self.most_gradients_wrong = False

    # Where a step begins

    def initial(self) -> Location | None:
        """Finds weights that are missing, differ between ranks that share them, or are others."""
        whole = self._single.names(self._step, "initial")
        if self._step == 0:
            held = {name for rank in self._job.ranks for name in rank.names(0, "initial")}
            for name in whole:
                if name not in held:
                    ranks = list(self._ranks.values())
                    finding = self._finding(name, "initial", "", ranks, causes.MISSING)
                    return finding._replace(layer=_missing_layer(name, held))
        names = {name for r in self._job.ranks for name in r.names(self._step, "initial")}
        order = [*whole, *sorted(names - whole.keys())]
        for name in order:
            parts = self._parts("initial", name)
            unequal = self._unequal(name, parts, whole.get(name))
            if unequal is not None:
                return unequal
        return self._drawn(whole) if self._step == 0 else None

    def _unequal(self, name: str, parts: Parts, whole: np.ndarray | None) -> Location | None:
        by_shard: dict[tuple[int, ...], list[int]] = defaultdict(list)
        split = whole is not None and any(p.shape != whole.shape for p in parts.values())
        axes = self._split_axes(parts, whole) if split and whole is not None else ()
        for number in parts:
            coordinate = self._ranks[number].coordinate
            by_shard[tuple(coordinate.get(axis, 0) for axis in axes)].append(number)
        alone = [rank for rank in self._holders(name) if rank.rank not in parts]
        if self._step and alone and not split:
            wrong = [self._ranks[number] for number in parts]
            axis = axis_between(wrong, alone, self._job.degrees)
            return self._finding(name, "initial", axis, wrong, of_unequal(axis, self._step))
        for members in by_shard.values():
            first = parts[members[0]]
            bad = [n for n in members if parts[n].tobytes() != first.tobytes()]
            if bad:
                good = [self._ranks[n] for n in members if n not in bad]
                wrong = [self._ranks[n] for n in bad]
                axis = axis_between(wrong, good, self._job.degrees)
                apart = max(gap(parts[n], first) for n in bad)
                cause = of_unequal(axis, self._step)
                return self._finding(name, "initial", axis, wrong, cause, apart)
        leads = [parts[members[0]] for members in by_shard.values()]
        same = len(leads) > 1 and all(_alike(leads[0], other) for other in leads[1:])
        if same and whole is not None and axes and leads[0].std() > 0 and self._step == 0:
            return self._finding(
                name, "initial", axes[0], [self._ranks[n] for n in parts], causes.SAME_SHARDS, 1.0
            )
        return None

    def _drawn(self, whole: Mapping[str, np.ndarray]) -> Location | None:
        """Compares with what the twin has drawn, where most of a rank's weights are just that."""
        for rank in self._job.ranks:
            held = rank.names(0, "initial")
            alike = [n for n in held if n in whole and whole[n].shape == held[n].shape]
            random = [n for n in alike if whole[n].size > 1 and whole[n].std() > 0]
            other = [n for n in random if not _alike(held[n], whole[n])]
            constant = [
                n
                for n in alike
                if n not in random and whole[n].size > 1 and not _alike(held[n], whole[n])
            ]
            if (other and 4 * len(other) <= len(random)) or constant:
                name = (other if 4 * len(other) <= len(random) and other else constant)[0]
                wrong = [r for r in self._job.ranks if name in r.names(0, "initial")]
                return self._finding(name, "initial", "", wrong, causes.OTHER_WEIGHTS, 1.0)
        return None

    # Gradients

    def cleared(self) -> Location | None:
        """Finds ranks that begin backward with gradients where the twin has none."""

        def left(rank: RankTensors) -> bool:
            return any(place.part == LEFT for place in rank.of(self._step, "gradient"))

        wrong = [rank for rank in self._job.ranks if left(rank)]
        if not wrong or left(self._single):
            return None
        rest = [rank for rank in self._job.ranks if rank not in wrong]
        axis = axis_between(wrong, rest, self._job.degrees)
        return self._finding("", "gradient", axis, wrong, causes.NOT_CLEARED)

    def gradient(self) -> tuple[float, Location] | None:
        """Finds the first gradient that is wrong before ranks add up theirs, in backward's order.

        Returns:
            With the position of its layer in the twin's backward.
        """
        firsts: list[tuple[float, Location]] = []
        for name, whole in self._single.names(self._step, "reduction").items():
            parts = self._parts("gradient", name)
            if not parts:
                if self._holders(name):
                    cause = causes.NO_GRADIENT
                    ranks = self._holders(name)
                    finding = self._finding(name, "gradient", "", ranks, cause)
                    firsts.append((self._position(name), finding))
                continue
            tolerance = self._tolerance("reduction", name, whole)
            best = self._local[name] = self._best(parts, whole, tolerance)
            bad = [n for n, apart in best.apart.items() if not apart <= tolerance]
            if bad:
                firsts.append((self._position(name), self._of_gradient(name, best, bad, whole)))
        self.most_gradients_wrong = 2 * len(firsts) > len(self._local) > 1
        return min(firsts, key=lambda pair: pair[0], default=None)

    def _of_gradient(self, name: str, best: Best, bad: list[int], whole: np.ndarray) -> Location:
        wrong = [self._ranks[n] for n in bad]
        right = [self._ranks[n] for n in best.apart if n not in bad]
        axis = axis_between(wrong, right, self._job.degrees)
        axis = axis or next(iter(self._split_axes(self._parts("gradient", name), whole)), "")
        axis = axis or ("mp" if self._job.degrees.get("mp", 1) > 1 else "")
        worst = max(best.apart.values())
        cause, tolerance = causes.GRADIENT, self._tolerance("reduction", name, whole)
        parts = self._parts("gradient", name)
        if len(self._stages(name)) > 1:
            axis, cause = "pp", causes.TIED
            for number in parts:
                halved = {n: part / 2 if n == number else part for n, part in parts.items()}
                if max(self._best(halved, whole, tolerance).apart.values()) <= tolerance:
                    wrong, cause = [self._ranks[number]], causes.TWICE
        return self._finding(name, "gradient", axis, wrong, cause, worst, tolerance)

    def _best(self, parts: Parts, whole: np.ndarray, tolerance: float) -> Best:
        axes = [
            a for a, n in self._job.degrees.items() if n > 1 and a not in ("ep", "moe_sharding")
        ]
        results: list[tuple[float, int, Best]] = []
        for count in range(len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                totals = {n: self._total(n, parts, chosen) for n in parts}
                for scale in self._scales:
                    apart = {n: self._apart(t / scale, whole, n) for n, t in totals.items()}
                    worst = max(apart.values())
                    results.append((worst, count, Best(apart, chosen)))
                    if worst <= tolerance:
                        return results[-1][2]
        return min(results, key=lambda result: result[:2])[2]

    def _total(self, number: int, parts: Parts, axes: Sequence[str]) -> np.ndarray:
        here = self._ranks[number].coordinate
        members = [
            other
            for other in parts
            if all(
                self._ranks[other].coordinate.get(a, 0) == place
                for a, place in here.items()
                if a not in (*axes, "ep", "moe_sharding")
            )
            and parts[other].shape == parts[number].shape
        ]
        total: np.ndarray = np.sum([parts[m].astype("float64") for m in members], axis=0)
        return total

    def reduction(self) -> Location | None:
        """Finds the first gradient that is wrong once ranks have added up theirs."""
        wrong: list[tuple[float, str, list[int], float]] = []
        for name, whole in self._single.names(self._step, "reduction").items():
            parts = self._parts("reduction", name)
            tolerance = self._tolerance("reduction", name, whole)
            apart = {n: self._apart(part, whole, n) for n, part in parts.items()}
            bad = [
                n
                for n in apart
                if not apart[n] <= tolerance and not self._elsewhere(n, apart, tolerance)
            ]
            if bad:
                wrong.append((self._position(name), name, bad, max(apart.values())))
        if not wrong:
            return None
        _, name, bad, worst = min(wrong)
        whole = self._single.names(self._step, "reduction")[name]
        parts = self._parts("reduction", name)
        ratio = self._ratio(parts[bad[0]], whole, bad[0])
        local = self._local.get(name)
        axes = local.axes if local else ()
        missing = [a for a in axes if self._not_added(bad[0], a, name, parts)]
        axis, cause = causes.of_reduction(
            self._job.degrees, axes, missing, ratio, name, shared=len(self._stages(name)) > 1
        )
        ranks, tolerance = [self._ranks[n] for n in bad], self._tolerance("reduction", name, whole)
        return self._finding(name, "reduction", axis, ranks, cause, worst, tolerance)

    def _elsewhere(self, number: int, apart: Mapping[int, float], tolerance: float) -> bool:
        """Whether another rank of the optimizer's shards has the gradient, who steps by it."""
        here = {**self._ranks[number].coordinate, "sharding": 0}
        return self._job.degrees.get("sharding", 1) > 1 and any(
            gap_ <= tolerance and {**self._ranks[n].coordinate, "sharding": 0} == here
            for n, gap_ in apart.items()
        )

    def _not_added(self, number: int, axis: str, name: str, parts: Parts) -> bool:
        """Whether ranks along an axis have not the same gradient after it was to be added up."""
        here = {**self._ranks[number].coordinate, axis: 0}
        return any(
            not _alike(parts[number], part)
            for n, part in parts.items()
            if {**self._ranks[n].coordinate, axis: 0} == here
        )

    def _ratio(self, part: np.ndarray, whole: np.ndarray, number: int) -> float | None:
        """Returns by which factor a gradient is too large; None where no factor explains it."""
        for expected in self._slices(whole, part.shape, self._ranks[number]):
            size = float((expected.astype("float64") ** 2).sum())
            if size == 0:
                continue
            ratio = float((part.astype("float64") * expected).sum()) / size
            if ratio and gap(part / ratio, expected) < 1e-3:
                return ratio
        return None

    # The step

    def clip(self) -> Location | None:
        """Finds ranks that do not clip, or the first gradient that was clipped by another norm."""
        place = Meaning(self._step, "optimizer input", "", part="learning rate")
        clipping = [rank for rank in self._job.ranks if rank.names(self._step, "clip")]
        # A rank whose shard has no parameter steps none, and clips none.
        stepping = [rank for rank in self._job.ranks if place in rank.tensors]
        rest = [rank for rank in stepping if rank not in clipping]
        if clipping and rest and self._single.names(self._step, "clip"):
            axis = axis_between(rest, clipping, self._job.degrees)
            return self._finding("", "clip", axis, rest, causes.UNCLIPPED)
        return self._first("clip", NORM, "mp", "pp", "sharding")

    def trained(self) -> Location | None:
        """Finds a parameter that no optimizer has; a clip's norm is another without it."""
        place = Meaning(self._step, "optimizer input", "", part="learning rate")
        trained = {name for rank in self._job.ranks for name in _listed(rank, place)}
        for name in _listed(self._single, place):
            if trained and name not in trained and self._holders(name):
                ranks = self._holders(name)
                return self._finding(name, "optimizer input", "", ranks, causes.UNTRAINED)
        return None

    def optimizer_input(self) -> Location | None:
        """Compares learning rates."""
        place = Meaning(self._step, "optimizer input", "", part="learning rate")
        rate = self._single.tensors.get(place)
        rates = {r.rank: r.tensors[place] for r in self._job.ranks if place in r.tensors}
        apart = {} if rate is None else {n: gap(other, rate) for n, other in rates.items()}
        bad = [n for n, far in apart.items() if far]
        if not bad:
            return None
        wrong = [self._ranks[n] for n in bad]
        rest = [self._ranks[n] for n in rates if n not in bad]
        axis = axis_between(wrong, rest, self._job.degrees)
        worst = max(apart.values())
        return self._finding("", "optimizer input", axis, wrong, causes.RATE, worst)

    def update(self) -> Location | None:
        """Finds the first parameter that became another one."""
        return self._first("update", causes.UPDATE, "sharding", "mp")

    def buffers(self) -> Location | None:
        """Finds the first buffer that differs; replicas have statistics of their own samples."""
        if any(self._job.degrees.get(a, 1) > 1 for a in ("dp", "sharding", "sep", "cp", "ep")):
            return None
        return self._first("buffer", causes.BUFFER)

    def _first(self, phase: str, cause: str, *axes: str) -> Location | None:
        for name, whole in self._single.names(self._step, phase).items():
            parts = self._parts(phase, name)
            tolerance = self._tolerance(phase, name, whole)
            apart = {n: self._apart(part, whole, n) for n, part in parts.items()}
            bad = [n for n, far in apart.items() if not far <= tolerance]
            if bad:
                wrong = [self._ranks[n] for n in bad]
                right = [self._ranks[n] for n in apart if n not in bad]
                axis = axis_between(wrong, right, self._job.degrees)
                if axes:
                    axis = axis or first_split(self._job.degrees, *axes)
                worst = max(apart.values())
                return self._finding(name, phase, axis, wrong, cause, worst, tolerance)
        return None

    # What all of them need

    def _parts(self, phase: str, name: str) -> Parts:
        parts: Parts = {}
        for rank in self._job.ranks:
            for part in ("parameter", "gradient", "buffer"):
                tensor = rank.tensors.get(Meaning(self._step, phase, name, part=part))
                if tensor is not None:
                    parts[rank.rank] = tensor
        return parts

    def _holders(self, name: str) -> list[RankTensors]:
        return [rank for rank in self._job.ranks if name in rank.names(self._step, "update")]

    def _stages(self, name: str) -> set[int]:
        return {rank.coordinate.get("pp", 0) for rank in self._holders(name)}

    def _slices(
        self, whole: np.ndarray, shape: tuple[int, ...], rank: RankTensors
    ) -> Iterator[np.ndarray]:
        if whole.shape == shape:
            yield whole
            return
        for layout in layouts(whole.shape, shape, self._job.degrees):
            yield part_of(whole, layout, rank.coordinate, self._job.degrees)

    def _apart(self, part: np.ndarray, whole: np.ndarray, number: int) -> float:
        scale = largest(whole)
        slices = self._slices(whole, part.shape, self._ranks[number])
        # Sums of several ranks are kept wider.
        return min((gap(part, s.astype(part.dtype), scale) for s in slices), default=0.0)

    def _split_axes(self, parts: Parts, whole: np.ndarray) -> tuple[str, ...]:
        part = next(iter(parts.values()))
        layout = next(layouts(whole.shape, part.shape, self._job.degrees), ())
        return tuple(axis for cut in layout for axis in cut.axes)

    def _tolerance(self, phase: str, name: str, whole: np.ndarray) -> float:
        parts = {"initial": "parameter", "update": "parameter", "buffer": "buffer"}
        place = Meaning(self._step, phase, name, part=parts.get(phase, "gradient"))
        return self._tolerances.at(place, whole.dtype)

    def _position(self, name: str) -> float:
        """Returns when the twin has the gradient of a parameter: after that of its layer."""
        layer = name.rpartition(".")[0]
        places = {"forward": [-1.0], "gradient": [-1.0]}
        for (phase, path, _), at in self._positions.items():
            if path == layer and phase in places:
                places[phase].append(at)
        forward, backward = max(places["forward"]), max(places["gradient"])
        if backward >= 0:
            return backward + 0.5
        return float("inf") if forward < 0 else 1e9 - forward

    def _finding(
        self,
        name: str,
        phase: str,
        axis: str,
        ranks: Sequence[RankTensors],
        cause: str,
        difference: float = float("inf"),
        tolerance: float = 0.0,
    ) -> Location:
        numbers = sorted({rank.rank for rank in ranks})
        layer = name.rpartition(".")[0] or name
        cause = f"{name}: {cause}" if name else cause
        return Location(layer, phase, axis, numbers, self._step, None, difference, tolerance, cause)


def _missing_layer(name: str, held: set[str]) -> str:
    """Returns the outermost layer around a parameter none of whose parameters is there."""
    steps = name.split(".")
    paths = (".".join(steps[:count]) for count in range(1, len(steps)))
    missing = (p for p in paths if not any(other.startswith(p + ".") for other in held))
    return next(missing, name)


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _listed(rank: RankTensors, place: Meaning) -> list[str]:
    text = rank.tensors.get(place._replace(part="parameters"))
    return [] if text is None else json.loads(text.tobytes().decode())
