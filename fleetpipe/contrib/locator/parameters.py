"""Compares parameters, their gradients and their updates on every rank with the twin's.

The twin is the same script on one device. Start with ``ParameterChecks``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.compare.differences import gap, largest_of, same_numbers
from fleetpipe.contrib import locator
from fleetpipe.contrib.locator import Location
from fleetpipe.contrib.locator.flow import StepBesideTwin
from fleetpipe.contrib.locator.layouts import possible_layouts
from fleetpipe.contrib.locator.record import LEFT, READ_ON, RankTensors
from fleetpipe.mesh.axes import NORM, of_unequal

#: By rank, what it has of a parameter, gradient or buffer: the full tensor or a shard.
ByRank = dict[int, np.ndarray]


class BestSum(NamedTuple):
    """The axes along which the sums of the ranks' gradients are nearest to the twin's gradient.

    Attributes:
        apart: By rank, the relative difference between the sum and the twin's gradient.
        axes: The axes along which the gradients are added up.
    """

    apart: dict[int, float]
    axes: tuple[str, ...]


class ParameterChecks:
    """Compares parameters, gradients and buffers in a step; each method compares one phase.

    Each ``check_`` method returns the first difference of its phase, or None.

    Attributes:
        most_gradients_wrong: Whether :meth:`find_gradient` has found wrong gradients of most
            parameters, before the reduction.
    """

    def __init__(self, step: StepBesideTwin) -> None:
        """Takes the records of the step that is compared."""
        self._step, self._job, self._twin = step, step.job, step.twin
        #: The key of an optimizer's learning rate, which a rank has if its optimizer steps.
        self._rate = step.key("optimizer input", role="learning rate")
        #: By rank, the names of the parameters that its optimizer has.
        self._optimized = {n: r.optimizer_parameters(self._rate) for n, r in step.ranks.items()}
        #: By parameter, what :meth:`find_gradient` has found, for :meth:`check_reduction`.
        self._best_sums: dict[str, BestSum] = {}
        self.most_gradients_wrong = False

    # Where a step begins

    def check_initial(self) -> Location | None:
        """Finds weights that are missing, differ between ranks that share them, or are wrong."""
        step = self._step.number
        # In later steps a parameter is recorded only where the script has changed it.
        full = self._twin.by_name(step, "initial")
        names = {name for rank in self._job.ranks for name in rank.by_name(step, "initial")}
        if step == 0 and (finding := self._find_other_names(full, names)):
            return finding
        ordered = [*full, *sorted(names - full.keys())]
        for name in ordered:
            by_rank = self._by_rank("initial", name)
            if unequal := self._find_unequal_copies(name, by_rank, full.get(name)):
                return unequal
        return self._find_changed(ordered) if step else self._find_redrawn(full)

    def _find_other_names(self, full: Mapping[str, np.ndarray], names: set[str]) -> Location | None:
        """Finds a parameter that the job lacks, or one that the one-device twin never has.

        Args:
            full: The twin's parameters at the begin, by name.
            names: The names of the parameters of all ranks.
        """
        for name in full:
            if name not in names:
                finding = self._describe(name, "initial", self._step.ranks, locator.MISSING)
                return finding._replace(layer=_missing_layer(name, names))
        ever = {key.name for key in self._twin.tensors}
        for rank in self._job.ranks:
            for name in rank.by_name(0, "initial"):
                if name not in ever:
                    ranks = self._by_rank("initial", name)
                    return self._describe(name, "initial", ranks, locator.EXTRA)
        return None

    def _find_changed(self, names: Sequence[str]) -> Location | None:
        """Finds a weight that the script has changed since the last step, unlike in the twin.

        Args:
            names: The parameters that some rank or the twin has changed.
        """
        step = self._step.number
        if any(p.step == step - 1 and p.role == READ_ON for p in self._twin.tensors):
            # The twin has run these lines of the script several times, to read further samples.
            return None
        # A value that the script has not changed since is that after the last step's update.
        values = {**self._twin.by_name(step - 1, "update"), **self._twin.by_name(step, "initial")}
        for name in names:
            if (full := values.get(name)) is None:
                continue
            by_rank = {**self._by_rank("update", name, -1), **self._by_rank("initial", name)}
            tolerance = max(self._tolerance(p, name, full) for p in ("initial", "update"))
            finding = name, "initial", by_rank, full, tolerance, locator.CHANGED
            if wrong := self._locate_wrong_ranks(*finding):
                return wrong
        return None

    def _find_unequal_copies(
        self, name: str, by_rank: ByRank, full: np.ndarray | None
    ) -> Location | None:
        """Finds ranks with another value of a parameter than ranks that share it.

        At the first step it also finds shards of the parameter that are all equal or misplaced.

        Args:
            name: The parameter.
            by_rank: By rank, its value of the parameter: the full tensor or a shard.
            full: The one-device twin's value; None if the twin has none.
        """
        axes = self._axes_splitting(by_rank, full) if full is not None else ()
        if self._step.number and not axes:
            # Ranks that recorded no change have the value that the step before left.
            holders = self._ranks_with(name)
            before = self._by_rank("update", name, -1)
            by_rank = {**{n: before[n] for n in holders if n in before}, **by_rank}
        # The ranks that have the same shard, by their coordinates on the axes that split it.
        by_shard: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number in by_rank:
            coordinate = self._step.ranks[number].coordinate
            by_shard[tuple(coordinate.get(axis, 0) for axis in axes)].append(number)
        for members in by_shard.values():
            first = by_rank[members[0]]
            if bad := [n for n in members if by_rank[n].tobytes() != first.tobytes()]:
                axis = self._step.axis_of(bad, members)
                worst = max(gap(by_rank[n], first) for n in bad)
                cause = of_unequal(axis, self._step.number)
                return self._describe(name, "initial", bad, cause, axis, worst)
        if self._step.number or not axes or full is None:
            return None
        first, *further = [by_rank[members[0]] for members in by_shard.values()]
        if further and first.std() > 0 and all(same_numbers(first, shard) for shard in further):
            return self._describe(name, "initial", by_rank, locator.SAME_SHARDS, axes[0], 1.0)
        return self._find_misplaced(name, by_rank, full, axes)

    def _find_misplaced(
        self, name: str, by_rank: ByRank, full: np.ndarray, axes: Sequence[str]
    ) -> Location | None:
        """Finds ranks with other ranks' shards, or with slightly other values than the twin's.

        Args:
            name: The parameter.
            by_rank: By rank, its shard of the parameter.
            full: The twin's value.
            axes: The axes that split the parameter.
        """

        def distance(number: int, owner: int) -> float:
            """Returns how far rank ``number``'s shard is from the one that ``owner`` should have.

            The distance is a relative difference, infinite if no shard has the shape.
            """
            expected = self._step.possible_shards(full, by_rank[number].shape, owner)
            return min((gap(by_rank[number], shard) for shard in expected), default=float("inf"))

        apart = {number: distance(number, number) for number in by_rank}
        wrong = [number for number, far in apart.items() if far]
        near = [number for number in wrong if apart[number] < 1e-2]
        moved = all(any(distance(n, owner) == 0 for owner in by_rank) for n in wrong)
        bad, cause = (wrong, locator.MISPLACED) if moved else (near, locator.OTHER_WEIGHTS)
        if bad and len(near) < len(by_rank):  # slightly other values on all ranks are no fault
            return self._describe(name, "initial", bad, cause, axes[0], max(apart[n] for n in bad))
        return None

    def _find_redrawn(self, full: Mapping[str, np.ndarray]) -> Location | None:
        """Finds a weight with another initial value than the one-device twin's.

        A weight that is drawn at random counts only if most others of the rank equal the twin's:
        else the job draws in another order.

        Args:
            full: The twin's parameters at the begin, by name.
        """
        for rank in self._job.ranks:
            initial = rank.by_name(0, "initial")
            # The weights that the rank has as full tensors.
            unsplit = [n for n in initial if n in full and full[n].shape == initial[n].shape]
            # A model part with shards or experts draws fewer numbers, and then different ones.
            sharded = {n.partition(".")[0] for n in full.keys() - {*unsplit}}
            random = {n for n in unsplit if full[n].std() > 0}
            several = [n for n in unsplit if full[n].size > 1]
            wrong = [n for n in several if not same_numbers(initial[n], full[n])]
            drawn = [n for n in wrong if n in random and n.partition(".")[0] not in sharded]
            drawn = drawn if 4 * len(drawn) <= len(random) else []
            for name in [*drawn, *(n for n in wrong if n not in random)][:1]:
                ranks = self._by_rank("initial", name)
                return self._describe(name, "initial", ranks, locator.OTHER_WEIGHTS, "", 1.0)
        return None

    # Gradients

    def check_cleared(self) -> Location | None:
        """Finds ranks that begin backward with gradients that are left from the step before.

        Returns:
            None if there are no such ranks, or if the one-device twin begins with such gradients
            too: then the script means to keep them.
        """

        def has_old(rank: RankTensors) -> bool:
            """Returns whether the record has gradients of the step before, in the role ``LEFT``."""
            return any(key.role == LEFT for key in rank.in_phase(self._step.number, "gradient"))

        bad = [rank.rank for rank in self._job.ranks if has_old(rank)]
        if not bad or has_old(self._twin):
            return None
        cause = locator.NOT_CLEARED
        return self._step.location("", "gradient", bad, cause, among=self._step.ranks)

    def find_gradient(self) -> tuple[float, Location] | None:
        """Finds the first gradient, in backward's order, that is wrong before the reduction.

        Returns:
            The position of its layer in the one-device twin's backward, and the difference; None if
            all gradients are right.
        """
        firsts: list[tuple[float, Location]] = []
        # The twin's gradients after backward, and those by which its optimizer has stepped.
        before = self._twin.by_name(self._step.number, "gradient")
        stepped = self._twin.by_name(self._step.number, "reduction")
        # The latter may be clipped by the script itself, and are averages if the twin has read the
        # samples of several replicas one after another.
        for name, full in (stepped if self._step.reads_on else {**stepped, **before}).items():
            by_rank = self._by_rank("gradient", name)
            if not by_rank:
                # An expert without tokens has no gradient in the twin either.
                if name in before and (ranks := self._ranks_with(name)):
                    finding = self._describe(name, "gradient", ranks, locator.NO_GRADIENT)
                    firsts.append((self._backward_position(name), finding))
                continue
            tolerance = self._tolerance("reduction", name, full)
            best = self._best_sums[name] = self._find_best_sum(by_rank, full, tolerance)
            bad = [n for n, apart in best.apart.items() if not apart <= tolerance]
            if bad:
                finding = self._describe_gradient(name, best, bad, full, tolerance)
                firsts.append((self._backward_position(name), finding))
        self.most_gradients_wrong = 2 * len(firsts) > len(self._best_sums) > 1
        return min(firsts, key=lambda pair: pair[0], default=None)

    def _describe_gradient(
        self, name: str, best: BestSum, bad: list[int], full: np.ndarray, tolerance: float
    ) -> Location:
        """Returns the location and likely cause of a gradient that is wrong before the reduction.

        Args:
            name: The parameter.
            best: The sums of the ranks' gradients that are nearest to the one-device twin's.
            bad: The ranks whose sums are wrong.
            full: The twin's gradient.
            tolerance: The difference that rounding causes.
        """
        by_rank, cause = self._by_rank("gradient", name), locator.GRADIENT
        axis = self._step.axis_of(bad, best.apart)
        axis = axis or self._step.first_split_axis(*self._axes_splitting(by_rank, full), "mp")
        absent = [number for number in self._ranks_with(name) if number not in by_rank]
        if absent:
            bad, cause = absent, locator.ABSENT_GRADIENT
            axis = self._step.axis_of(absent, [*absent, *by_rank])
        elif len(self._stages_with(name)) > 1:
            axis, cause = "pp", locator.TIED
            for number in by_rank:
                # If the sum is right with half of this rank's gradient, the rank counts it twice.
                halved = {n: tensor / 2 if n == number else tensor for n, tensor in by_rank.items()}
                if max(self._find_best_sum(halved, full, tolerance).apart.values()) <= tolerance:
                    bad, cause = [number], locator.TWICE
        worst = max(best.apart.values())
        return self._describe(name, "gradient", bad, cause, axis, worst, tolerance)

    def _find_best_sum(self, by_rank: ByRank, full: np.ndarray, tolerance: float) -> BestSum:
        """Finds the axes along which the ranks' gradients add up to the twin's, the fewest first.

        Args:
            by_rank: By rank, its gradient of a parameter: the full tensor or a shard.
            full: The twin's gradient.
            tolerance: The difference that rounding causes.

        Returns:
            The first sums that differ by rounding only; if there are none, the nearest.
        """
        axes = [axis for axis in self._step.degrees if axis not in ("ep", "moe_sharding")]
        results: list[tuple[float, int, BestSum]] = []

        def total(number: int, chosen: Sequence[str]) -> np.ndarray:
            """Returns the sum of the gradients of the ranks along the chosen axes, in float64.

            These ranks differ from rank ``number`` only in their coordinates on these axes.
            """
            members = self._step.ranks_along(number, (*chosen, "ep", "moe_sharding"), by_rank)
            tensors = [by_rank[n] for n in members if by_rank[n].shape == by_rank[number].shape]
            summed: np.ndarray = np.sum([t.astype("float64") for t in tensors], axis=0)
            return summed

        for count in range(len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                totals = {n: total(n, chosen) for n in by_rank}
                for scale in self._step.scales:  # factors that ranks divide by only afterwards
                    apart = self._gaps_to_shards({n: t / scale for n, t in totals.items()}, full)
                    worst, best = max(apart.values()), BestSum(apart, chosen)
                    if worst <= tolerance:
                        return best
                    results.append((worst, count, best))
        return min(results, key=lambda result: result[:2])[2]

    def check_reduction(self) -> Location | None:
        """Finds the first gradient that is wrong after the reduction over ranks."""
        expected = self._twin.by_name(self._step.number, "reduction")
        for name in sorted(expected, key=self._backward_position):
            apart = self._gaps_to_shards(self._by_rank("reduction", name), expected[name])
            tolerance = self._tolerance("reduction", name, expected[name])
            # Only the gradients that an optimizer steps by must be right. With optimizer shards
            # another rank steps the parameter for this one.
            right = [n for n, far in apart.items() if far <= tolerance]
            stepping = [n for n in self._ranks_stepping(name) if n in apart]
            bad = [n for n in stepping if not self._step.ranks_along(n, ("sharding",), right)]
            if bad:
                worst = max(apart.values())
                return self._describe_reduction(name, expected[name], bad, worst, tolerance)
        return None

    def _describe_reduction(
        self, name: str, full: np.ndarray, bad: list[int], worst: float, tolerance: float
    ) -> Location:
        """Returns the location and likely cause of a gradient that is wrong after the reduction.

        Args:
            name: The parameter.
            full: The one-device twin's gradient.
            bad: The ranks whose gradients are wrong.
            worst: The largest relative difference.
            tolerance: The difference that rounding causes.
        """
        by_rank = self._by_rank("reduction", name)
        tensor = by_rank[bad[0]]
        axes = self._best_sums[name].axes if name in self._best_sums else ()
        # After a reduction along an axis all of its ranks have the same gradient.
        members = {axis: self._step.ranks_along(bad[0], (axis,), by_rank) for axis in axes}
        # The axes along which the reduction is missing.
        missing = [a for a in axes if not all(same_numbers(tensor, by_rank[n]) for n in members[a])]
        ratio, shared = self._scale_factor(tensor, full, bad[0]), len(self._stages_with(name)) > 1
        axis, cause = locator.cause_of_wrong_reduction(
            self._step.degrees, axes, missing, ratio, name, shared
        )
        return self._describe(name, "reduction", bad, cause, axis, worst, tolerance)

    def _scale_factor(self, tensor: np.ndarray, full: np.ndarray, number: int) -> float | None:
        """Returns the factor by which a gradient is too large; None if no factor explains it.

        Args:
            tensor: The gradient of a rank.
            full: The one-device twin's gradient.
            number: The rank.
        """
        for expected in self._step.possible_shards(full, tensor.shape, number):
            # The factor of the least squares.
            size = float((expected.astype("float64") ** 2).sum())
            ratio = float((tensor.astype("float64") * expected).sum()) / (size or 1.0)
            if ratio and gap(tensor / ratio, expected) < 1e-3:
                return ratio
        return None

    # The step

    def check_clip(self) -> Location | None:
        """Finds ranks that do not clip, or the first gradient clipped by a wrong global norm."""
        clipping = [r.rank for r in self._job.ranks if r.by_name(self._step.number, "clip")]
        # A rank whose optimizer shard is empty neither steps nor clips.
        stepping = [r.rank for r in self._job.ranks if self._rate in r.tensors]
        rest = [number for number in stepping if number not in clipping]
        if rest and self._twin.by_name(self._step.number, "clip"):
            among = [*rest, *clipping]
            return self._step.location("", "clip", rest, locator.UNCLIPPED, among=among)
        # NORM is the cause: the global norm is another one.
        return self._find_first_wrong("clip", NORM, "mp", "pp", "sharding", *self._step.degrees)

    def check_trained(self) -> Location | None:
        """Finds a parameter that no optimizer has, unlike in the one-device twin."""
        trained = {name for names in self._optimized.values() for name in names}
        for name in self._twin.optimizer_parameters(self._rate):
            if trained and name not in trained and (ranks := self._ranks_with(name)):
                return self._describe(name, "optimizer input", ranks, locator.UNTRAINED)
        return None

    def check_learning_rate(self) -> Location | None:
        """Finds ranks with another learning rate than the one-device twin's."""
        rate = self._twin.tensors.get(self._rate)
        apart = {} if rate is None else self._step.gaps_of_ranks(self._rate, rate)
        return self._step.beyond_rounding("", "optimizer input", apart, 0.0, locator.RATE)

    def check_update(self) -> Location | None:
        """Finds the first parameter with a wrong update."""
        return self._find_first_wrong(
            "update", locator.UPDATE, "sharding", "mp", *self._step.degrees
        )

    def check_buffers(self) -> Location | None:
        """Finds the first buffer that differs; None if ranks have different samples or parts."""
        # Then each has the running statistics of its own.
        if self._step.first_split_axis("dp", "sharding", "sep", "cp", "ep"):
            return None
        return self._find_first_wrong("buffer", locator.BUFFER)

    def _find_first_wrong(self, phase: str, cause: str, *axes: str) -> Location | None:
        """Finds the first tensor of a phase that differs from the one-device twin's.

        Args:
            phase: The phase of the step.
            cause: The likely cause, in a sentence.
            axes: The axes that may be blamed, in this order, if the ranks that are wrong do not
                show which.
        """
        for name, full in self._twin.by_name(self._step.number, phase).items():
            by_rank = self._by_rank(phase, name)
            if phase == "update":
                by_rank = {
                    n: tensor for n, tensor in by_rank.items() if not self._is_sent_later(n, name)
                }
            tolerance = self._tolerance(phase, name, full)
            if wrong := self._locate_wrong_ranks(
                name, phase, by_rank, full, tolerance, cause, *axes
            ):
                return wrong
        return None

    def _locate_wrong_ranks(
        self,
        name: str,
        phase: str,
        by_rank: ByRank,
        full: np.ndarray,
        tolerance: float,
        cause: str,
        *axes: str,
    ) -> Location | None:
        """Returns the location of the ranks with a wrong tensor; None if there are none.

        Args:
            name: The parameter or buffer.
            phase: The phase of the step.
            by_rank: By rank, its tensor.
            full: The one-device twin's tensor.
            tolerance: The difference that rounding causes.
            cause: The likely cause, in a sentence.
            axes: The axes that may be named if the wrong ranks do not show the axis.
        """
        layer, cause = name.rpartition(".")[0] or name, f"{name}: {cause}"
        apart = self._gaps_to_shards(by_rank, full)
        return self._step.beyond_rounding(layer, phase, apart, tolerance, cause, *axes)

    def _is_sent_later(self, number: int, name: str) -> bool:
        """Returns whether rank ``number`` receives a parameter only after this step's record.

        Another rank updates the parameter then, and the script sends it, so that this rank has the
        new value at the beginning of the next step. After the last step this is assumed.
        """
        stepping = self._ranks_stepping(name)
        if not stepping or number in stepping:
            return False
        is_last = self._step.number + 1 == self._job.steps
        return is_last or number in self._by_rank("initial", name, 1)

    def _ranks_stepping(self, name: str) -> list[int]:
        """Returns the ranks whose optimizers step a parameter."""
        return [rank for rank, names in self._optimized.items() if name in names]

    # Shared by the checks

    def _by_rank(self, phase: str, name: str, later: int = 0) -> ByRank:
        """Returns, by rank, the rank's parameter, gradient or buffer in a phase.

        Args:
            phase: The phase.
            name: The parameter or buffer.
            later: 0 for this step, 1 for the next, -1 for the step before.

        Returns:
            The tensors, full or shards; ranks without one are left out.
        """
        keys = [
            self._step.key(phase, name, role)._replace(step=self._step.number + later)
            for role in ("parameter", "gradient", "buffer")
        ]
        return {r.rank: r.tensors[key] for r in self._job.ranks for key in keys if key in r.tensors}

    def _ranks_with(self, name: str) -> list[int]:
        """Returns the ranks that have a parameter after this step."""
        return [*self._by_rank("update", name)]

    def _stages_with(self, name: str) -> set[int]:
        """Returns the coordinates on pp of the ranks that have a parameter."""
        return {self._step.ranks[n].coordinate.get("pp", 0) for n in self._ranks_with(name)}

    def _gaps_to_shards(self, by_rank: ByRank, full: np.ndarray) -> dict[int, float]:
        """Returns, by rank, the relative difference of its tensor from its shard of the twin's.

        How tensors are split is not recorded: of the shards that a rank may have, the one with the
        smallest difference counts. The difference is 0 if no shard has the shape of the tensor.

        Args:
            by_rank: By rank, its tensor: the full tensor or a shard.
            full: The twin's tensor, by whose largest number differences are divided.
        """
        scale = largest_of(full)

        def gap_of(number: int, tensor: np.ndarray) -> float:
            """Returns how far a rank's tensor is from the nearest of its possible shards."""
            expected = self._step.possible_shards(full, tensor.shape, number)
            # By the dtype of the tensor, as a sum over several ranks is in float64.
            return min((gap(tensor, p.astype(tensor.dtype), scale) for p in expected), default=0.0)

        return {number: gap_of(number, tensor) for number, tensor in by_rank.items()}

    def _axes_splitting(self, by_rank: ByRank, full: np.ndarray) -> tuple[str, ...]:
        """Returns the axes that split a tensor, by the shapes of a rank's and the twin's tensor.

        Of several possible layouts the first counts; () if none fits.
        """
        shape = next(iter(by_rank.values())).shape
        layout = next(possible_layouts(full.shape, shape, self._step.degrees), ())
        return tuple(axis for cut in layout for axis in cut.axes)

    def _tolerance(self, phase: str, name: str, full: np.ndarray) -> float:
        """Returns the relative difference that rounding may cause in a tensor of a phase."""
        roles = {"initial": "parameter", "update": "parameter", "buffer": "buffer"}
        return self._step.tolerance(self._step.key(phase, name, roles.get(phase, "gradient")), full)

    def _backward_position(self, name: str) -> float:
        """Returns a number by which parameters are sorted in the order of the twin's backward.

        A parameter comes right after the gradient of its layer's output. Parameters of layers
        without a recorded gradient come behind all others, against the order of forward; those of
        layers without a recorded output come last.
        """
        layer, positions = name.rpartition(".")[0], self._step.positions.items()
        in_backward = [n for key, n in positions if (key.phase, key.name) == ("gradient", layer)]
        in_forward = [n for key, n in positions if (key.phase, key.name) == ("forward", layer)]
        if in_backward:
            return max(in_backward) + 0.5
        return 1e9 - max(in_forward) if in_forward else float("inf")

    def _describe(
        self,
        name: str,
        phase: str,
        ranks: Collection[int],
        cause: str,
        axis: str = "",
        difference: float = float("inf"),
        tolerance: float = 0.0,
    ) -> Location:
        """Returns the location of a parameter's difference, by :meth:`StepBesideTwin.location`."""
        layer, cause = name.rpartition(".")[0] or name, f"{name}: {cause}" if name else cause
        return self._step.location(layer, phase, ranks, cause, axis, None, difference, tolerance)


def _missing_layer(name: str, recorded: set[str]) -> str:
    """Returns the outermost layer around a parameter of which no parameter is recorded.

    Args:
        name: A parameter that is not recorded.
        recorded: The names of the recorded parameters.
    """
    words = name.split(".")
    for count in range(1, len(words)):
        path = ".".join(words[:count])
        if not any(other.startswith(path + ".") for other in recorded):
            return path
    return name
