"""Compares parameters, their gradients and their updates on every rank with the twin's."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.contrib.locator import causes
from fleetpipe.contrib.locator.causes import Location, axis_between, first_split
from fleetpipe.contrib.locator.layouts import layouts, parts_of
from fleetpipe.contrib.locator.record import LEFT, READ_ON, Meaning, RankTensors, Record
from fleetpipe.contrib.locator.tolerance import Tolerances, gap, largest, same_bits
from fleetpipe.mesh.causes import NORM, of_unequal

#: By rank.
Parts = dict[int, np.ndarray]


class Best(NamedTuple):
    """The smallest difference between ranks' gradients, or sums of them, and the twin's."""

    #: By rank, how far its sum is off.
    apart: dict[int, float]
    #: Along which they are added up.
    axes: tuple[str, ...]


class ParameterChecks:
    """The checks of parameters in each phase of a step."""

    def __init__(
        self,
        job: Record,
        single: RankTensors,
        tolerances: Tolerances,
        step: int,
        scales: Sequence[int],
        positions: Mapping[tuple[str, str, str], float],
    ) -> None:
        """Prepares the checks of a step.

        Args:
            job: The tensors of the job's ranks.
            single: The tensors of the twin.
            tolerances: The differences that rounding may cause.
            step: The step.
            scales: The factor by which a gradient may be larger before ranks average it.
            positions: The position of each tensor in the twin's computation.
        """
        self._job, self._single, self._tolerances = job, single, tolerances
        self._step, self._scales = step, scales
        self._ranks = {rank.rank: rank for rank in job.ranks}
        self._positions = positions
        self._rate = Meaning(step, "optimizer input", "", part="learning rate")
        self._listed = {rank.rank: rank.listed(self._rate) for rank in job.ranks}
        self._local: dict[str, Best] = {}
        #: Whether gradients before the reduction are wrong for most parameters.
        self.most_gradients_wrong = False

    # Where a step begins

    def initial(self) -> Location | None:
        """Finds weights that are missing, differ between ranks that share them, or are wrong."""
        whole = self._single.names(self._step, "initial")
        names = {name for r in self._job.ranks for name in r.names(self._step, "initial")}
        for name in whole if self._step == 0 else ():
            if name not in names:
                finding = self._finding(name, "initial", "", self._job.ranks, causes.MISSING)
                return finding._replace(layer=_missing_layer(name, names))
        ordered = [*whole, *sorted(names - whole.keys())]
        for name in ordered:
            if unequal := self._unequal(name, self._parts("initial", name), whole.get(name)):
                return unequal
        return self._find_changed(ordered) if self._step else self._find_redrawn(whole)

    def _find_changed(self, names: Sequence[str]) -> Location | None:
        """Finds a weight that the script changed after a step."""
        step, rank = self._step, self._single
        if Meaning(step - 1, "data", "", part=READ_ON) in rank.tensors:
            # To read further samples the twin has gone through these lines several times.
            return None
        left = {**rank.names(step - 1, "update"), **rank.names(step, "initial")}
        for name in names:
            if (whole := left.get(name)) is None:
                continue
            parts = {**self._parts("update", name, -1), **self._parts("initial", name)}
            apart = {n: self._apart(part, whole, n) for n, part in parts.items()}
            tolerance = max(self._tolerance(phase, name, whole) for phase in ("initial", "update"))
            if bad := [n for n, far in apart.items() if not far <= tolerance]:
                wrong, axis = self._apart_from(bad, apart)
                worst = max(apart.values())
                return self._finding(name, "initial", axis, wrong, causes.CHANGED, worst, tolerance)
        return None

    def _unequal(self, name: str, parts: Parts, whole: np.ndarray | None) -> Location | None:
        by_shard: dict[tuple[int, ...], list[int]] = defaultdict(list)
        axes = self._split_axes(parts, whole) if whole is not None else ()
        if self._step and not axes:
            # On the others it is as the step before has left it.
            holders = [r for r in self._holders(name) if r.rank not in parts]
            left = {r.rank: r.names(self._step - 1, "update").get(name) for r in holders}
            parts = {**{n: part for n, part in left.items() if part is not None}, **parts}
        for number in parts:
            coordinate = self._ranks[number].coordinate
            by_shard[tuple(coordinate.get(axis, 0) for axis in axes)].append(number)
        for members in by_shard.values():
            first = parts[members[0]]
            bad = [n for n in members if parts[n].tobytes() != first.tobytes()]
            if bad:
                wrong, axis = self._apart_from(bad, members)
                apart = max(gap(parts[n], first) for n in bad)
                cause = of_unequal(axis, self._step)
                return self._finding(name, "initial", axis, wrong, cause, apart)
        leads = [parts[members[0]] for members in by_shard.values()]
        same = len(leads) > 1 and all(same_bits(leads[0], other) for other in leads[1:])
        if same and axes and leads[0].std() > 0 and self._step == 0:
            ranks = [self._ranks[n] for n in parts]
            return self._finding(name, "initial", axes[0], ranks, causes.SAME_SHARDS, 1.0)
        if whole is None or not axes or self._step:
            return None
        return self._find_misplaced(name, parts, whole, axes)

    def _find_misplaced(
        self, name: str, parts: Parts, whole: np.ndarray, axes: Sequence[str]
    ) -> Location | None:
        """Finds ranks with the shard of other ranks, or with one close to it."""

        def distance(number: int, place: int) -> float:
            expected = self._parts_of(whole, parts[number].shape, place)
            return min((gap(parts[number], part) for part in expected), default=float("inf"))

        here = {number: distance(number, number) for number in parts}
        wrong = [number for number, far in here.items() if far]
        near = [number for number in wrong if here[number] < 1e-2]
        moved = all(any(distance(n, other) == 0 for other in parts) for n in wrong)
        bad, cause = (wrong, causes.MISPLACED) if moved else (near, causes.OTHER_WEIGHTS)
        if bad and len(near) < len(parts):
            ranks, far = [self._ranks[n] for n in bad], max(here[n] for n in bad)
            return self._finding(name, "initial", axes[0], ranks, cause, far)
        return None

    def _find_redrawn(self, whole: Mapping[str, np.ndarray]) -> Location | None:
        """Compares with the twin's initial values, if most weights of a rank equal those."""
        for rank in self._job.ranks:
            held = rank.names(0, "initial")
            alike = [n for n in held if n in whole and whole[n].shape == held[n].shape]
            # Beside experts and shards that other ranks draw, what is drawn later is another.
            parted = {n.partition(".")[0] for n in whole.keys() - {*alike}}
            random = [n for n in alike if whole[n].std() > 0]
            other = [n for n in alike if not same_bits(held[n], whole[n]) and whole[n].size > 1]
            constant = [n for n in other if n not in random]
            other = [n for n in other if n in random and n.partition(".")[0] not in parted]
            few = other if 4 * len(other) <= len(random) else []
            for name in (few + constant)[:1]:
                wrong = [r for r in self._job.ranks if name in r.names(0, "initial")]
                return self._finding(name, "initial", "", wrong, causes.OTHER_WEIGHTS, 1.0)
        return None

    # Gradients

    def cleared(self) -> Location | None:
        """Finds ranks that start backward with old gradients when the twin has none."""

        def has_old(rank: RankTensors) -> bool:
            return any(place.part == LEFT for place in rank.of(self._step, "gradient"))

        bad = [rank.rank for rank in self._job.ranks if has_old(rank)]
        if not bad or has_old(self._single):
            return None
        wrong, axis = self._apart_from(bad, self._ranks)
        return self._finding("", "gradient", axis, wrong, causes.NOT_CLEARED)

    def gradient(self) -> tuple[float, Location] | None:
        """Finds the first gradient, in backward's order, that is wrong before the reduction.

        Returns:
            The position of its layer in the twin's backward, and the place.
        """
        firsts: list[tuple[float, Location]] = []
        before = self._single.names(self._step, "gradient")
        stepped = self._single.names(self._step, "reduction")
        # A script may clip by hand before the step; what a twin reads on is averaged there too.
        averaged = Meaning(self._step, "data", "", part=READ_ON) in self._single.tensors
        for name, whole in (stepped if averaged else {**stepped, **before}).items():
            parts = self._parts("gradient", name)
            if not parts:
                # Experts that no token came to have none on one device either.
                if name in before and (ranks := self._holders(name)):
                    finding = self._finding(name, "gradient", "", ranks, causes.NO_GRADIENT)
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
        wrong, axis = self._apart_from(bad, best.apart)
        parts = self._parts("gradient", name)
        axis = axis or next(iter(self._split_axes(parts, whole)), "")
        axis = axis or ("mp" if self._job.degrees.get("mp", 1) > 1 else "")
        cause, tolerance = causes.GRADIENT, self._tolerance("reduction", name, whole)
        absent = [rank.rank for rank in self._holders(name) if rank.rank not in parts]
        if absent:
            wrong, axis = self._apart_from(absent, [*absent, *parts])
            cause = causes.ABSENT_GRADIENT
        elif len(self._stages(name)) > 1:
            axis, cause = "pp", causes.TIED
            for number in parts:
                halved = {n: part / 2 if n == number else part for n, part in parts.items()}
                if max(self._best(halved, whole, tolerance).apart.values()) <= tolerance:
                    wrong, cause = [self._ranks[number]], causes.TWICE
        worst = max(best.apart.values())
        return self._finding(name, "gradient", axis, wrong, cause, worst, tolerance)

    def _best(self, parts: Parts, whole: np.ndarray, tolerance: float) -> Best:
        axes = [axis for axis in self._job.degrees if axis not in ("ep", "moe_sharding")]
        results: list[tuple[float, int, Best]] = []
        for count in range(len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                totals = {n: self._total(n, parts, chosen) for n in parts}
                for scale in self._scales:
                    apart = {n: self._apart(t / scale, whole, n) for n, t in totals.items()}
                    results.append((max(apart.values()), count, Best(apart, chosen)))
                    if results[-1][0] <= tolerance:
                        return results[-1][2]
        return min(results, key=lambda result: result[:2])[2]

    def _total(self, number: int, parts: Parts, axes: Sequence[str]) -> np.ndarray:
        members = self._members(number, (*axes, "ep", "moe_sharding"), parts)
        members = [n for n in members if parts[n].shape == parts[number].shape]
        total: np.ndarray = np.sum([parts[m].astype("float64") for m in members], axis=0)
        return total

    def reduction(self) -> Location | None:
        """Finds the first gradient that is wrong after the reduction over ranks."""
        expected = self._single.names(self._step, "reduction")
        for name in sorted(expected, key=self._position):
            apart, tolerance = self._compare("reduction", name, expected[name])
            # What an optimizer does not step by may be anything: another rank has the sum.
            stepping = self._stepping(name)
            bad = [n for n in stepping if n in apart and not self._is_right(n, apart, tolerance)]
            if bad:
                return self._of_reduction(name, expected[name], bad, max(apart.values()))
        return None

    def _of_reduction(self, name: str, whole: np.ndarray, bad: list[int], worst: float) -> Location:
        parts = self._parts("reduction", name)
        part = parts[bad[0]]
        ratio = self._ratio(part, whole, bad[0])
        axes = self._local[name].axes if name in self._local else ()
        # Ranks along these have not the same gradient, after it was to be added up.
        members = {axis: self._members(bad[0], (axis,), parts) for axis in axes}
        missing = [a for a in axes if not all(same_bits(part, parts[n]) for n in members[a])]
        axis, cause = causes.of_reduction(
            self._job.degrees, axes, missing, ratio, name, shared=len(self._stages(name)) > 1
        )
        ranks, tolerance = [self._ranks[n] for n in bad], self._tolerance("reduction", name, whole)
        return self._finding(name, "reduction", axis, ranks, cause, worst, tolerance)

    def _is_right(self, number: int, apart: Mapping[int, float], tolerance: float) -> bool:
        """Whether a rank is right, or the optimizer shard that steps the parameter for it."""
        return any(apart[n] <= tolerance for n in self._members(number, ("sharding",), apart))

    def _members(self, number: int, axes: Sequence[str], of: Iterable[int]) -> list[int]:
        """Returns the ranks that differ from one on some axes only."""
        anywhere, here = dict.fromkeys(axes, 0), self._ranks[number].coordinate
        return [n for n in of if {**self._ranks[n].coordinate, **anywhere} == {**here, **anywhere}]

    def _ratio(self, part: np.ndarray, whole: np.ndarray, number: int) -> float | None:
        """Returns the factor by which a gradient is too large; None if no factor explains it."""
        for expected in self._parts_of(whole, part.shape, number):
            size = float((expected.astype("float64") ** 2).sum())
            if size == 0:
                continue
            ratio = float((part.astype("float64") * expected).sum()) / size
            if ratio and gap(part / ratio, expected) < 1e-3:
                return ratio
        return None

    # The step

    def clip(self) -> Location | None:
        """Finds ranks that do not clip, or the first gradient clipped by another norm."""
        clipping = [r.rank for r in self._job.ranks if r.names(self._step, "clip")]
        # A rank whose shard has no parameter steps none, and clips none.
        stepping = [r.rank for r in self._job.ranks if self._rate in r.tensors]
        rest = [number for number in stepping if number not in clipping]
        if clipping and rest and self._single.names(self._step, "clip"):
            wrong, axis = self._apart_from(rest, clipping)
            return self._finding("", "clip", axis, wrong, causes.UNCLIPPED)
        return self._first("clip", NORM, "mp", "pp", "sharding")

    def trained(self) -> Location | None:
        """Finds a parameter that no optimizer has, which also changes a clip's norm."""
        trained = {name for names in self._listed.values() for name in names}
        for name in self._single.listed(self._rate):
            if trained and name not in trained and (ranks := self._holders(name)):
                return self._finding(name, "optimizer input", "", ranks, causes.UNTRAINED)
        return None

    def optimizer_input(self) -> Location | None:
        """Compares learning rates."""
        rate = self._single.tensors.get(self._rate)
        rates = {r.rank: r.tensors[self._rate] for r in self._job.ranks if self._rate in r.tensors}
        apart = {n: gap(other, rate) for n, other in rates.items() if rate is not None}
        bad = [n for n, far in apart.items() if far]
        wrong, axis = self._apart_from(bad, rates)
        far = max(apart.values(), default=0.0)
        return self._finding("", "optimizer input", axis, wrong, causes.RATE, far) if bad else None

    def update(self) -> Location | None:
        """Finds the first parameter with a wrong update."""
        return self._first("update", causes.UPDATE, "sharding", "mp")

    def buffers(self) -> Location | None:
        """Finds the first buffer that differs; replicas have statistics of their own samples."""
        if any(self._job.degrees.get(a, 1) > 1 for a in ("dp", "sharding", "sep", "cp", "ep")):
            return None
        return self._first("buffer", causes.BUFFER)

    def _first(self, phase: str, cause: str, *axes: str) -> Location | None:
        for name, whole in self._single.names(self._step, phase).items():
            apart, tolerance = self._compare(phase, name, whole)
            bad = [n for n, far in apart.items() if not far <= tolerance]
            bad = [n for n in bad if phase != "update" or not self._is_sent(n, name)]
            if bad:
                wrong, axis = self._apart_from(bad, apart)
                axis = axis or (first_split(self._job.degrees, *axes) if axes else "")
                worst = max(apart.values())
                return self._finding(name, phase, axis, wrong, cause, worst, tolerance)
        return None

    def _is_sent(self, number: int, name: str) -> bool:
        """Whether another rank steps a parameter and the script sends it afterwards."""
        stepping = self._stepping(name)
        after = self._ranks[number].names(self._step + 1, "initial")
        later = name in after or self._step + 1 == self._job.steps
        return bool(stepping) and number not in stepping and later

    def _stepping(self, name: str) -> list[int]:
        """Returns the ranks whose optimizers step a parameter."""
        return [rank for rank, names in self._listed.items() if name in names]

    # What all of them need

    def _parts(self, phase: str, name: str, later: int = 0) -> Parts:
        kinds = ("parameter", "gradient", "buffer")
        places = [Meaning(self._step + later, phase, name, part=kind) for kind in kinds]
        return {r.rank: r.tensors[p] for r in self._job.ranks for p in places if p in r.tensors}

    def _compare(self, phase: str, name: str, whole: np.ndarray) -> tuple[dict[int, float], float]:
        """Returns for each rank the difference of its value, and the allowed difference."""
        parts = self._parts(phase, name)
        apart = {n: self._apart(part, whole, n) for n, part in parts.items()}
        return apart, self._tolerance(phase, name, whole)

    def _apart_from(self, bad: Sequence[int], of: Iterable[int]) -> tuple[list[RankTensors], str]:
        """Returns the bad ranks, and an axis that separates them from the other ranks of ``of``."""
        wrong = [self._ranks[n] for n in bad]
        rest = [self._ranks[n] for n in of if n not in bad]
        return wrong, axis_between(wrong, rest, self._job.degrees)

    def _holders(self, name: str) -> list[RankTensors]:
        return [rank for rank in self._job.ranks if name in rank.names(self._step, "update")]

    def _stages(self, name: str) -> set[int]:
        return {rank.coordinate.get("pp", 0) for rank in self._holders(name)}

    def _apart(self, part: np.ndarray, whole: np.ndarray, number: int) -> float:
        scale = largest(whole)
        parts = self._parts_of(whole, part.shape, number)
        # Sums of several ranks are kept wider.
        return min((gap(part, p.astype(part.dtype), scale) for p in parts), default=0.0)

    def _parts_of(
        self, whole: np.ndarray, shape: tuple[int, ...], number: int
    ) -> Iterator[np.ndarray]:
        return parts_of(whole, shape, self._ranks[number].coordinate, self._job.degrees)

    def _split_axes(self, parts: Parts, whole: np.ndarray) -> tuple[str, ...]:
        shape = next(iter(parts.values())).shape
        layout = next(layouts(whole.shape, shape, self._job.degrees), ())
        return tuple(axis for cut in layout for axis in cut.axes)

    def _tolerance(self, phase: str, name: str, whole: np.ndarray) -> float:
        kinds = {"initial": "parameter", "update": "parameter", "buffer": "buffer"}
        part = kinds.get(phase, "gradient")
        return self._tolerances.at(Meaning(self._step, phase, name, part=part), whole.dtype)

    def _position(self, name: str) -> float:
        """Returns the place of a parameter's gradient in the order of the twin's backward."""
        layer = name.rpartition(".")[0]

        def last(phase: str) -> float:
            places = (at for key, at in self._positions.items() if key[:2] == (phase, layer))
            return max(places, default=-1.0)

        if last("gradient") >= 0:
            return last("gradient") + 0.5
        return 1e9 - last("forward") if last("forward") >= 0 else float("inf")

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
    """Returns the outermost layer around a parameter that has no recorded parameter."""
    steps = name.split(".")
    paths = (".".join(steps[:count]) for count in range(1, len(steps)))
    missing = (p for p in paths if not any(other.startswith(p + ".") for other in held))
    return next(missing, name)
