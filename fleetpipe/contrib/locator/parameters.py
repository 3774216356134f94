"""Compares parameters, their gradients and their updates on every rank with the twin's."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.compare.differences import gap, largest_of, same_numbers
from fleetpipe.contrib import locator
from fleetpipe.contrib.locator import Location
from fleetpipe.contrib.locator.flow import StepBesideTwin
from fleetpipe.contrib.locator.layouts import layouts
from fleetpipe.contrib.locator.record import LEFT, READ_ON, RankTensors
from fleetpipe.mesh.axes import NORM, of_unequal

#: By rank its part of a parameter, gradient or buffer.
Parts = dict[int, np.ndarray]


class Best(NamedTuple):
    """The sums of the ranks' gradients along some axes that are nearest to the twin's gradient.

    Attributes:
        apart: By rank the relative difference of its sum.
        axes: The axes along which the gradients are added up.
    """

    apart: dict[int, float]
    axes: tuple[str, ...]


class ParameterChecks:
    """The checks of parameters in each phase of a step.

    Attributes:
        most_gradients_wrong: Whether gradients before the reduction are wrong for most parameters.
    """

    def __init__(self, step: StepBesideTwin) -> None:
        self._at, self._job, self._twin = step, step.job, step.twin
        self._rate = step.place("optimizer input", part="learning rate")
        self._listed = {number: rank.listed(self._rate) for number, rank in step.ranks.items()}
        self._local: dict[str, Best] = {}
        self.most_gradients_wrong = False

    # Where a step begins

    def initial(self) -> Location | None:
        """Finds weights that are missing, differ between ranks that share them, or are wrong."""
        step = self._at.number
        whole = self._twin.names(step, "initial")
        names = {name for rank in self._job.ranks for name in rank.names(step, "initial")}
        if step == 0 and (finding := self._find_other_names(whole, names)):
            return finding
        ordered = [*whole, *sorted(names - whole.keys())]
        for name in ordered:
            if unequal := self._unequal(name, self._parts("initial", name), whole.get(name)):
                return unequal
        return self._find_changed(ordered) if step else self._find_redrawn(whole)

    def _find_other_names(
        self, whole: Mapping[str, np.ndarray], names: set[str]
    ) -> Location | None:
        """Finds a parameter that the job lacks, or one that the twin never has."""
        for name in whole:
            if name not in names:
                finding = self._finding(name, "initial", self._at.ranks, locator.MISSING)
                return finding._replace(layer=_missing_layer(name, names))
        ever = {place.name for place in self._twin.tensors}
        for rank in self._job.ranks:
            for name in rank.names(0, "initial"):
                if name not in ever:
                    ranks = self._parts("initial", name)
                    return self._finding(name, "initial", ranks, locator.EXTRA)
        return None

    def _find_changed(self, names: Sequence[str]) -> Location | None:
        """Finds a weight that the script changed after a step."""
        step = self._at.number
        if any(p.step == step - 1 and p.part == READ_ON for p in self._twin.tensors):
            # The twin has run these lines of the script several times, to read further samples.
            return None
        left = {**self._twin.names(step - 1, "update"), **self._twin.names(step, "initial")}
        for name in names:
            if (whole := left.get(name)) is not None:
                parts = {**self._parts("update", name, -1), **self._parts("initial", name)}
                tolerance = max(self._tolerance(p, name, whole) for p in ("initial", "update"))
                if wrong := self._wrong(name, "initial", parts, whole, tolerance, locator.CHANGED):
                    return wrong
        return None

    def _unequal(self, name: str, parts: Parts, whole: np.ndarray | None) -> Location | None:
        """Finds ranks whose shard differs from that of ranks with the same shard."""
        axes = self._split_axes(parts, whole) if whole is not None else ()
        if self._at.number and not axes:
            # Ranks that recorded no change have the value that the step before left.
            holders = [*self._holders(name)]
            left = self._parts("update", name, -1)
            parts = {**{n: part for n, part in left.items() if n in holders}, **parts}
        by_shard: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number in parts:
            coordinate = self._at.ranks[number].coordinate
            by_shard[tuple(coordinate.get(axis, 0) for axis in axes)].append(number)
        for members in by_shard.values():
            first = parts[members[0]]
            if bad := [n for n in members if parts[n].tobytes() != first.tobytes()]:
                axis, far = self._at.axis_of(bad, members), max(gap(parts[n], first) for n in bad)
                cause = of_unequal(axis, self._at.number)
                return self._finding(name, "initial", bad, cause, axis, far)
        if self._at.number or not axes or whole is None:
            return None
        leads = [parts[members[0]] for members in by_shard.values()]
        if len(leads) > 1 and leads[0].std() > 0 and all(same_numbers(leads[0], t) for t in leads):
            return self._finding(name, "initial", parts, locator.SAME_SHARDS, axes[0], 1.0)
        return self._find_misplaced(name, parts, whole, axes)

    def _find_misplaced(
        self, name: str, parts: Parts, whole: np.ndarray, axes: Sequence[str]
    ) -> Location | None:
        """Finds ranks with other ranks' shards, or with other values than the rest."""

        def distance(number: int, place: int) -> float:
            expected = self._at.parts_of(whole, parts[number].shape, place)
            return min((gap(parts[number], part) for part in expected), default=float("inf"))

        here = {number: distance(number, number) for number in parts}
        wrong = [number for number, far in here.items() if far]
        near = [number for number in wrong if here[number] < 1e-2]
        moved = all(any(distance(n, other) == 0 for other in parts) for n in wrong)
        bad, cause = (wrong, locator.MISPLACED) if moved else (near, locator.OTHER_WEIGHTS)
        if bad and len(near) < len(parts):
            return self._finding(name, "initial", bad, cause, axes[0], max(here[n] for n in bad))
        return None

    def _find_redrawn(self, whole: Mapping[str, np.ndarray]) -> Location | None:
        """Compares with the twin's initial values, if most weights of a rank equal those."""
        for rank in self._job.ranks:
            held = rank.names(0, "initial")
            alike = [n for n in held if n in whole and whole[n].shape == held[n].shape]
            # A model part with shards or experts draws fewer numbers, and then different ones.
            parted = {n.partition(".")[0] for n in whole.keys() - {*alike}}
            random = {n for n in alike if whole[n].std() > 0}
            other = [n for n in alike if not same_numbers(held[n], whole[n]) and whole[n].size > 1]
            few = [n for n in other if n in random and n.partition(".")[0] not in parted]
            few = few if 4 * len(few) <= len(random) else []
            for name in [*few, *(n for n in other if n not in random)][:1]:
                wrong = self._parts("initial", name)
                return self._finding(name, "initial", wrong, locator.OTHER_WEIGHTS, "", 1.0)
        return None

    # Gradients

    def cleared(self) -> Location | None:
        """Finds ranks that begin backward with gradients of the step before, unlike the twin."""

        def has_old(rank: RankTensors) -> bool:
            return any(place.part == LEFT for place in rank.of(self._at.number, "gradient"))

        bad = [rank.rank for rank in self._job.ranks if has_old(rank)]
        if not bad or has_old(self._twin):
            return None
        axis = self._at.axis_of(bad, self._at.ranks)
        return self._finding("", "gradient", bad, locator.NOT_CLEARED, axis)

    def gradient(self) -> tuple[float, Location] | None:
        """Finds the first gradient, in backward's order, that is wrong before the reduction.

        Returns:
            The position of its layer in the twin's backward, and the place.
        """
        firsts: list[tuple[float, Location]] = []
        before = self._twin.names(self._at.number, "gradient")
        stepped = self._twin.names(self._at.number, "reduction")
        # A script may clip by itself before the step; a twin that reads on averages there.
        for name, whole in (stepped if self._at.reads_on else {**stepped, **before}).items():
            parts = self._parts("gradient", name)
            if not parts:
                # An expert without tokens has no gradient in the twin either.
                if name in before and (ranks := self._holders(name)):
                    finding = self._finding(name, "gradient", ranks, locator.NO_GRADIENT)
                    firsts.append((self._position(name), finding))
                continue
            tolerance = self._tolerance("reduction", name, whole)
            best = self._local[name] = self._best(parts, whole, tolerance)
            bad = [n for n, apart in best.apart.items() if not apart <= tolerance]
            if bad:
                finding = self._of_gradient(name, best, bad, whole, tolerance)
                firsts.append((self._position(name), finding))
        self.most_gradients_wrong = 2 * len(firsts) > len(self._local) > 1
        return min(firsts, key=lambda pair: pair[0], default=None)

    def _of_gradient(
        self, name: str, best: Best, bad: list[int], whole: np.ndarray, tolerance: float
    ) -> Location:
        parts, cause = self._parts("gradient", name), locator.GRADIENT
        axis = self._at.axis_of(bad, best.apart)
        axis = axis or self._at.split(*self._split_axes(parts, whole), "mp")
        absent = [number for number in self._holders(name) if number not in parts]
        if absent:
            bad, cause = absent, locator.ABSENT_GRADIENT
            axis = self._at.axis_of(absent, [*absent, *parts])
        elif len(self._stages(name)) > 1:
            axis, cause = "pp", locator.TIED
            for number in parts:
                halved = {n: part / 2 if n == number else part for n, part in parts.items()}
                if max(self._best(halved, whole, tolerance).apart.values()) <= tolerance:
                    bad, cause = [number], locator.TWICE
        worst = max(best.apart.values())
        return self._finding(name, "gradient", bad, cause, axis, worst, tolerance)

    def _best(self, parts: Parts, whole: np.ndarray, tolerance: float) -> Best:
        """Tries along which axes the ranks' gradients add up to the twin's."""
        axes = [axis for axis in self._at.degrees if axis not in ("ep", "moe_sharding")]
        results: list[tuple[float, int, Best]] = []

        def total(number: int, chosen: Sequence[str]) -> np.ndarray:
            members = self._at.members(number, (*chosen, "ep", "moe_sharding"), parts)
            tensors = [parts[n] for n in members if parts[n].shape == parts[number].shape]
            summed: np.ndarray = np.sum([one.astype("float64") for one in tensors], axis=0)
            return summed

        for count in range(len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                totals = {n: total(n, chosen) for n in parts}
                for scale in self._at.scales:
                    apart = self._gaps({n: t / scale for n, t in totals.items()}, whole)
                    results.append((max(apart.values()), count, Best(apart, chosen)))
                    if results[-1][0] <= tolerance:
                        return results[-1][2]
        return min(results, key=lambda result: result[:2])[2]

    def reduction(self) -> Location | None:
        """Finds the first gradient that is wrong after the reduction over ranks."""
        expected = self._twin.names(self._at.number, "reduction")
        for name in sorted(expected, key=self._position):
            apart = self._gaps(self._parts("reduction", name), expected[name])
            tolerance = self._tolerance("reduction", name, expected[name])
            # Only the gradients that an optimizer steps by must be right. With optimizer shards
            # another rank steps the parameter for this one.
            right = [n for n, far in apart.items() if far <= tolerance]
            stepping = [n for n in self._stepping(name) if n in apart]
            bad = [n for n in stepping if not self._at.members(n, ("sharding",), right)]
            if bad:
                worst = max(apart.values())
                return self._of_reduction(name, expected[name], bad, worst, tolerance)
        return None

    def _of_reduction(
        self, name: str, whole: np.ndarray, bad: list[int], worst: float, tolerance: float
    ) -> Location:
        parts = self._parts("reduction", name)
        part = parts[bad[0]]
        axes = self._local[name].axes if name in self._local else ()
        # After a reduction along an axis all of its ranks have the same gradient.
        members = {axis: self._at.members(bad[0], (axis,), parts) for axis in axes}
        missing = [a for a in axes if not all(same_numbers(part, parts[n]) for n in members[a])]
        ratio, shared = self._ratio(part, whole, bad[0]), len(self._stages(name)) > 1
        axis, cause = locator.of_reduction(self._at.degrees, axes, missing, ratio, name, shared)
        return self._finding(name, "reduction", bad, cause, axis, worst, tolerance)

    def _ratio(self, part: np.ndarray, whole: np.ndarray, number: int) -> float | None:
        """Returns the factor by which a gradient is too large; None if no factor explains it."""
        for expected in self._at.parts_of(whole, part.shape, number):
            size = float((expected.astype("float64") ** 2).sum())
            ratio = float((part.astype("float64") * expected).sum()) / (size or 1.0)
            if ratio and gap(part / ratio, expected) < 1e-3:
                return ratio
        return None

    # The step

    def clip(self) -> Location | None:
        """Finds ranks that do not clip, or the first gradient clipped by another norm."""
        clipping = [r.rank for r in self._job.ranks if r.names(self._at.number, "clip")]
        # A rank whose optimizer shard is empty neither steps nor clips.
        stepping = [r.rank for r in self._job.ranks if self._rate in r.tensors]
        rest = [number for number in stepping if number not in clipping]
        if rest and self._twin.names(self._at.number, "clip"):
            axis = self._at.axis_of(rest, [*rest, *clipping])
            return self._finding("", "clip", rest, locator.UNCLIPPED, axis)
        return self._first("clip", NORM, "mp", "pp", "sharding", *self._at.degrees)

    def trained(self) -> Location | None:
        """Finds a parameter that no optimizer has, unlike in the twin."""
        trained = {name for names in self._listed.values() for name in names}
        for name in self._twin.listed(self._rate):
            if trained and name not in trained and (ranks := self._holders(name)):
                return self._finding(name, "optimizer input", ranks, locator.UNTRAINED)
        return None

    def optimizer_input(self) -> Location | None:
        """Returns where the learning rates of the job and of its twin differ; None if nowhere."""
        rate = self._twin.tensors.get(self._rate)
        held = {r.rank: r.tensors[self._rate] for r in self._job.ranks if self._rate in r.tensors}
        apart = {n: gap(other, rate) for n, other in held.items() if rate is not None}
        if bad := [n for n, far in apart.items() if far]:
            axis, far = self._at.axis_of(bad, held), max(apart.values())
            return self._finding("", "optimizer input", bad, locator.RATE, axis, far)
        return None

    def update(self) -> Location | None:
        """Finds the first parameter with a wrong update."""
        return self._first("update", locator.UPDATE, "sharding", "mp", *self._at.degrees)

    def buffers(self) -> Location | None:
        """Finds the first buffer that differs; replicas have statistics of their own samples."""
        if self._at.split("dp", "sharding", "sep", "cp", "ep"):
            return None
        return self._first("buffer", locator.BUFFER)

    def _first(self, phase: str, cause: str, *axes: str) -> Location | None:
        """Finds the first tensor of a phase that differs from the twin's."""
        for name, whole in self._twin.names(self._at.number, phase).items():
            parts = self._parts(phase, name)
            if phase == "update":
                parts = {n: part for n, part in parts.items() if not self._is_sent(n, name)}
            tolerance = self._tolerance(phase, name, whole)
            finding = self._wrong(name, phase, parts, whole, tolerance, cause)
            if finding is not None:
                return finding._replace(axis=finding.axis or self._at.split(*axes))
        return None

    def _wrong(
        self,
        name: str,
        phase: str,
        parts: Parts,
        whole: np.ndarray,
        tolerance: float,
        cause: str,
    ) -> Location | None:
        """Finds ranks whose tensor is not the twin's."""
        apart = self._gaps(parts, whole)
        bad = [n for n, far in apart.items() if not far <= tolerance]
        if not bad:
            return None
        axis, worst = self._at.axis_of(bad, apart), max(apart.values())
        return self._finding(name, phase, bad, cause, axis, worst, tolerance)

    def _is_sent(self, number: int, name: str) -> bool:
        """Whether another rank steps a parameter and the script sends it afterwards."""
        stepping, following = self._stepping(name), self._at.number + 1
        later = following == self._job.steps or number in self._parts("initial", name, 1)
        return bool(stepping) and number not in stepping and later

    def _stepping(self, name: str) -> list[int]:
        """Returns the ranks whose optimizers step a parameter."""
        return [rank for rank, names in self._listed.items() if name in names]

    # Shared by the checks

    def _parts(self, phase: str, name: str, later: int = 0) -> Parts:
        """Returns the ranks' tensors of a name in a phase of this step, or of one ``later``."""
        places = [
            self._at.place(phase, name, kind)._replace(step=self._at.number + later)
            for kind in ("parameter", "gradient", "buffer")
        ]
        return {r.rank: r.tensors[p] for r in self._job.ranks for p in places if p in r.tensors}

    def _holders(self, name: str) -> list[int]:
        return [*self._parts("update", name)]

    def _stages(self, name: str) -> set[int]:
        return {self._at.ranks[n].coordinate.get("pp", 0) for n in self._holders(name)}

    def _gaps(self, parts: Parts, whole: np.ndarray) -> dict[int, float]:
        """Returns the relative difference of each rank's tensor from its part of the twin's."""
        scale = largest_of(whole)

        def gap_of(number: int, part: np.ndarray) -> float:
            # Sums over several ranks are float64.
            expected = self._at.parts_of(whole, part.shape, number)
            return min((gap(part, p.astype(part.dtype), scale) for p in expected), default=0.0)

        return {number: gap_of(number, part) for number, part in parts.items()}

    def _split_axes(self, parts: Parts, whole: np.ndarray) -> tuple[str, ...]:
        shape = next(iter(parts.values())).shape
        layout = next(layouts(whole.shape, shape, self._at.degrees), ())
        return tuple(axis for cut in layout for axis in cut.axes)

    def _tolerance(self, phase: str, name: str, whole: np.ndarray) -> float:
        kinds = {"initial": "parameter", "update": "parameter", "buffer": "buffer"}
        return self._at.tolerance(self._at.place(phase, name, kinds.get(phase, "gradient")), whole)

    def _position(self, name: str) -> float:
        """Returns the position of a parameter's gradient in the order of the twin's backward."""
        layer = name.rpartition(".")[0]

        def last(phase: str) -> float:
            places = (at for key, at in self._at.positions.items() if key[:2] == (phase, layer))
            return max(places, default=-1.0)

        if last("gradient") >= 0:
            return last("gradient") + 0.5
        return 1e9 - last("forward") if last("forward") >= 0 else float("inf")

    def _finding(
        self,
        name: str,
        phase: str,
        ranks: Iterable[int],
        cause: str,
        axis: str = "",
        difference: float = float("inf"),
        tolerance: float = 0.0,
    ) -> Location:
        layer, cause = name.rpartition(".")[0] or name, f"{name}: {cause}" if name else cause
        return self._at.location(layer, phase, ranks, cause, axis, None, difference, tolerance)


def _missing_layer(name: str, held: set[str]) -> str:
    """Returns the outermost layer around a parameter that has no recorded parameter."""
    steps = name.split(".")
    paths = (".".join(steps[:count]) for count in range(1, len(steps)))
    missing = (p for p in paths if not any(other.startswith(p + ".") for other in held))
    return next(missing, name)
