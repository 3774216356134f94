"""Compares the phases of each step and returns the first place that differs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection

import numpy as np

from fleetpipe.compare.differences import gap
from fleetpipe.contrib.locator import causes
from fleetpipe.contrib.locator.causes import Location
from fleetpipe.contrib.locator.flow import Flow
from fleetpipe.contrib.locator.parameters import ParameterChecks
from fleetpipe.contrib.locator.record import DROPPED, Meaning, RankTensors, Record
from fleetpipe.contrib.locator.rows import Matched, is_sample, match
from fleetpipe.contrib.locator.step import StepBesideTwin, Tolerances
from fleetpipe.errors import UsageError
from fleetpipe.mesh.causes import STREAMS

#: Losses by micro-batch.
Losses = dict[int, float]


def first_difference(job: Record, twin: Record, perturbed: Record | None = None) -> Location | None:
    """Returns the first place where a job differs from its twin by more than rounding.

    Args:
        job: The tensors of the job's ranks.
        twin: The tensors of one device.
        perturbed: The same with numbers changed in the last place; None: any different bit counts.
    """
    tolerances = Tolerances(twin, perturbed)
    steps = (
        _Comparison(StepBesideTwin(job, twin, tolerances, number), match(job, twin, number))
        for number in range(min(job.steps, twin.steps))
    )
    return next((finding for step in steps if (finding := step.first()) is not None), None)


class _Comparison:
    """Compares one step of a job with the twin's."""

    def __init__(self, step: StepBesideTwin, matched: Matched) -> None:
        self._at, self._matched = step, matched
        self._flow, self._parameters = Flow(step, matched), ParameterChecks(step)

    def first(self) -> Location | None:
        """Returns the first place that differs in this step."""
        parameters = self._parameters
        checks: list[Callable[[], Location | None]] = [
            parameters.initial,
            self._evaluation,
            self._data,
            lambda: self._flow.first("forward"),
            self._streams,
            self._loss,
            self._returned_losses,
            parameters.cleared,
            self._backward,
            parameters.reduction,
            parameters.trained,
            parameters.clip,
            parameters.optimizer_input,
            parameters.update,
            parameters.buffers,
        ]
        return next((finding for check in checks if (finding := check()) is not None), None)

    # Data and loss

    def _evaluation(self) -> Location | None:
        """Finds ranks on which nothing of the model was recorded, as in the mode of evaluation."""
        step, ranks = self._at.number, self._at.job.ranks
        training = [
            r.rank for r in ranks if any(p.part.startswith("input") for p in r.of(step, "data"))
        ]
        wrong = [
            r.rank
            for r in ranks
            if r.rank not in training and {p.part for p in r.of(step, "loss")} == {"share"}
        ]
        if not training or not wrong:
            return None
        axis = self._at.axis_of(wrong, [*wrong, *training])
        return self._at.location("", "forward", wrong, causes.EVALUATING, axis)

    def _data(self) -> Location | None:
        at = self._at
        if self._matched.wrong is not None:
            cause, replica = self._matched.wrong
            if cause is causes.OTHER_SAMPLES and at.reads_on:
                raise _cut_by_the_script(replica, at.number)
            ranks = [n for n, rank in at.ranks.items() if at.job.replica(rank) == replica]
            axis = at.axis_of(ranks, at.ranks)
            return at.location("", "data", ranks, cause.format(replica), axis, 0)
        labels = [
            outcome
            for outcome in self._flow.outcomes("data")
            if not outcome.right
            and outcome.place.part.startswith("label")
            and is_sample(outcome.rank.tensors[outcome.place], outcome.place, at.twin)
        ]
        if not labels:
            return None
        first = min(outcome.place.micro_batch for outcome in labels)
        ranks = [o.rank.rank for o in labels if o.place.micro_batch == first]
        axis, split = at.axis_of(ranks, at.ranks), at.split("sep", "cp")
        cause = causes.LABELS if axis or not split else causes.LABELS_OF_PARTS
        return at.location("", "data", ranks, cause, axis or split, first)

    def _streams(self) -> Location | None:
        """Finds ranks whose dropouts drew the same numbers for different values."""
        at = self._at
        seen: dict[Meaning, list[tuple[RankTensors, bytes]]] = defaultdict(list)
        for rank in at.job.ranks:
            for place, mask in rank.of(at.number, "forward").items():
                if place.part == "mask" and mask.size > 32 and not mask.all():
                    seen[place].append((rank, mask.tobytes()))
        for place, masks in seen.items():
            for (one, drawn), (other, same) in itertools.combinations(masks, 2):
                axis = at.axis_of([one.rank], [one.rank, other.rank])
                if axis in ("", "pp", "ep") or drawn != same:
                    continue
                taken = [rank.tensors.get(place._replace(part=DROPPED)) for rank in (one, other)]
                if axis in ("mp", "sep", "cp") and _are_alike(*taken):
                    continue
                ranks, cause = [one.rank, other.rank], STREAMS.format(axis)
                measured = place.micro_batch, 1.0
                return at.location(place.name, "forward", ranks, cause, axis, *measured)
        return None

    def _loss(self) -> Location | None:
        """Compares the losses that backward began from."""
        at, flow = self._at, self._flow
        shares, expected = self._shares(), _shares_of(at.twin, at.number)
        if not shares or not expected:
            return None
        tolerance = at.tolerance(at.place("loss", "", "share", 0), np.zeros(1, "float32"))
        ratio = _sum(shares.values()) / (_sum([expected]) or 1.0)
        off = min(abs(ratio / n - 1) for n in at.scales)
        if off <= tolerance or self._has_parts(ratio, _sum([expected]), tolerance):
            return None
        if flow.waiting is not None:
            return flow.describe(flow.waiting)
        count = len(next(iter(shares.values())))
        cause = causes.of_loss(ratio, tolerance, at.scales, count, flow.rows, at.degrees)
        ranks = [rank.rank for rank in at.job.ranks if _shares_of(rank, at.number)]
        # Of rows that are no micro-batch of the twin's the loss is not known.
        wrong = [
            (number, rank.rank)
            for rank in at.job.ranks
            for number, share in _shares_of(rank, at.number).items()
            if (whole := flow.rows_of(rank, number).whole) in expected
            if min(abs(share / (expected[whole] or 1.0) / n - 1) for n in at.scales) > tolerance
        ]
        bad = [rank for _, rank in wrong] or ranks
        axis = at.axis_of(bad, ranks) or at.split("dp", "sharding", "sep", "cp", "mp")
        first = min(wrong)[0] if wrong else None
        return at.location("", "loss", bad, cause, axis, first, off, tolerance)

    def _shares(self, *more: str) -> dict[tuple[int, ...], Losses]:
        """Returns backward's losses, by place on the axes of data and ``more``."""
        shares: dict[tuple[int, ...], Losses] = {}
        for rank in self._at.job.ranks:
            axes = ("dp", "sharding", "sep", "cp", "ep", *more)
            place = tuple(rank.coordinate.get(axis, 0) for axis in axes)
            if place not in shares and (of_rank := _shares_of(rank, self._at.number)):
                shares[place] = of_rank
        return shares

    def _has_parts(self, ratio: float, expected: float, tolerance: float) -> bool:
        """Whether each member along mp has the loss of other tokens, which sum to the twin's."""
        members = self._at.degrees.get("mp", 1)
        total = _sum(self._shares("mp").values()) / (expected or 1.0)
        apart = abs(total - members * ratio) > tolerance * abs(total)
        ways = (k * n for k in (1, members) for n in self._at.scales)
        return apart and min(abs(total / n - 1) for n in ways) <= tolerance

    def _returned_losses(self) -> Location | None:
        """Compares the losses that ``train_batch`` returned."""
        at, place = self._at, self._at.place("loss", "", "returned 0")
        value = at.twin.tensors.get(place)
        if value is None:
            return None
        tolerance = at.tolerance(place, value)
        held = {n: rank.tensors[place] for n, rank in at.ranks.items() if place in rank.tensors}
        apart = {n: gap(tensor, value) for n, tensor in held.items()}
        bad = [n for n, far in apart.items() if not far <= tolerance]
        if not bad:
            return None
        axis = at.axis_of(bad, apart) or at.split("dp", "sharding", *at.degrees)
        worst = max(apart.values())
        return at.location("", "loss", bad, causes.RETURNED, axis, None, worst, tolerance)

    # Backward

    def _backward(self) -> Location | None:
        flow = self._flow
        outcomes = (o for o in flow.outcomes("gradient") if o.place.part.startswith("output"))
        wrong = flow.wrong(outcomes, backward=True)
        first = self._parameters.gradient()
        if wrong is None and first is not None:
            wrong = flow.waiting
        if wrong is not None and (first is None or wrong[0].position < first[0]):
            return flow.describe(wrong)
        if first is None:
            return None
        finding = first[1]
        if causes.NO_GRADIENT in finding.cause:
            return finding._replace(layer=flow.stopping() or finding.layer)
        if wrong is None and self._parameters.most_gradients_wrong:
            return finding._replace(layer="", cause=causes.ACCUMULATED)
        return finding


def _shares_of(rank: RankTensors, step: int) -> Losses:
    """Returns by micro-batch the losses that a rank's backward started from."""
    losses = rank.of(step, "loss").items()
    return {p.micro_batch: float(tensor.sum()) for p, tensor in losses if p.part == "share"}


def _sum(shares: Collection[Losses]) -> float:
    return sum(itertools.chain.from_iterable(losses.values() for losses in shares))


def _are_alike(value: np.ndarray | None, copy: np.ndarray | None) -> bool:
    """Whether two ranks have the same values before a dropout."""
    return value is None or copy is None or gap(value, copy) <= 1e-3


def _cut_by_the_script(replica: int, step: int) -> UsageError:
    return UsageError(
        f"the samples of replica {replica} cannot be compared with those of one device",
        where=f"step {step}, a loop without train_batch",
        cause="the script cuts them by a number of replicas that it does not ask Fleet for, so "
        "that on one device it reads those of one replica; or the sampler is wrong",
        fix="say how it runs on one device, with --twin NAME=VALUE or --twin-arguments",
    )
