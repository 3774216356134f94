"""Compares samples, the outputs of layers and their gradients in a step of a job and of its twin.

The twin is the same script on one device. A difference counts if it is larger than the effect of
rounding (``Tolerances``): the twin runs a second time with each number of its weights, data and
gradients changed by at most one unit in the last place, and how much a tensor changes by that is
the effect of rounding there. ``StepBesideTwin`` has the records of one step, ``LayerChecks``
compares them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fleetpipe.compare.differences import MARGIN, gap, largest_of, unit_of
from fleetpipe.contrib import locator
from fleetpipe.contrib.locator import Location
from fleetpipe.contrib.locator.layouts import (
    SampleMatch,
    SampleRows,
    gather_twin_rows,
    possible_shards,
)
from fleetpipe.contrib.locator.record import READ_ON, RankTensors, Record, TensorKey
from fleetpipe.mesh.axes import axis_between

#: The axes of the mesh along which ranks have shards of one tensor, or summands of it.
_SHARDED_AXES = ("mp", "ep", "sep", "cp")


class Tolerances:
    """The measured differences that rounding may cause in each tensor."""

    def __init__(self, twin: Record, perturbed: Record | None) -> None:
        """Measures how far the twin and its perturbed run are apart.

        Args:
            twin: The tensors of one device.
            perturbed: The tensors of one device with its numbers changed in the last place; None
                allows no difference.
        """
        #: By phase, name and role: the step and the relative change in it.
        self._measured: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
        self._exact = perturbed is None
        if perturbed is None:
            return
        (rank,), (other,) = twin.ranks, perturbed.ranks
        for key, tensor in rank.tensors.items():
            moved = other.tensors.get(key)
            if moved is not None and tensor.dtype.kind == "f":
                measured = key.step, min(gap(moved, tensor), 1.0)
                self._measured[key.phase, key.name, key.role].append(measured)

    def tolerance_of(self, key: TensorKey, dtype: np.dtype[np.generic]) -> float:
        """Returns the largest relative difference that passes as rounding for a tensor."""
        if self._exact or dtype.kind != "f":
            return 0.0
        # The changes in all micro-batches count, since a single one may be small by chance. Those
        # of later steps do not: after a fault they may have any size.
        changes = self._measured[key.phase, key.name, key.role]
        sizes = [size for step, size in changes if step <= key.step]
        return MARGIN * max([unit_of(dtype), *sizes])


class StepBesideTwin:
    """One step of a job and of its twin.

    Attributes:
        job: The tensors of the job's ranks.
        twin: The tensors of one device.
        number: The number of the step.
        ranks: The job's ranks by number.
        degrees: The degree of each axis along which the job has several ranks.
        scales: The factors by which a rank's loss or gradient may be larger before ranks average
            it, without a fault.
        reads_on: Whether the twin has read the samples of several replicas one after another.
        positions: By the key of a tensor without its step and micro-batch, its position in the
            order in which the twin computes them.
    """

    def __init__(self, job: Record, twin: Record, tolerances: Tolerances, number: int) -> None:
        """Takes step ``number`` of the records of a job and its twin."""
        self.job, self.number, self._tolerances = job, number, tolerances
        (self.twin,) = twin.ranks
        self.ranks = {rank.rank: rank for rank in job.ranks}
        self.degrees = job.degrees
        self.reads_on = self.key("data", role=READ_ON) in self.twin.tensors
        parts = [self.degrees.get(axis, 1) for axis in ("dp", "sharding", "sep", "cp", "ep")]
        # The degrees, the number of replicas, and that of ranks with other tokens in a stage.
        self.scales = sorted({1, *parts, int(np.prod(parts[:2])), int(np.prod(parts[:4]))})
        self.positions: dict[TensorKey, int] = {}
        for position, key in enumerate(self.twin.tensors):
            if key.step == number:
                self.positions.setdefault(key_in_any_batch(key), position)

    def key(self, phase: str, name: str = "", role: str = "", micro_batch: int = -1) -> TensorKey:
        """Returns the key of a tensor of this step from the fields of :class:`TensorKey`."""
        return TensorKey(self.number, phase, name, micro_batch, role)

    def tolerance(self, key: TensorKey, tensor: np.ndarray) -> float:
        """Returns the relative difference that rounding may cause in a tensor."""
        return self._tolerances.tolerance_of(key, tensor.dtype)

    def possible_shards(
        self, full: np.ndarray, shape: tuple[int, ...], rank: int
    ) -> Iterator[np.ndarray]:
        """Yields what a rank may have of a full tensor, by each way to split it among the ranks."""
        return possible_shards(full, shape, self.ranks[rank].coordinate, self.degrees)

    def gaps_of_ranks(self, key: TensorKey, expected: np.ndarray) -> dict[int, float]:
        """Returns, by rank, the relative difference of the rank's tensor from the expected one.

        Ranks without such a tensor are left out.
        """
        tensors = {n: rank.tensors.get(key) for n, rank in self.ranks.items()}
        return {n: gap(tensor, expected) for n, tensor in tensors.items() if tensor is not None}

    def ranks_along(self, rank: int, axes: Iterable[str], among: Iterable[int]) -> list[int]:
        """Returns the ranks of ``among`` whose coordinates equal ``rank``'s except on ``axes``."""
        ignored = dict.fromkeys(axes, 0)
        fixed = {**self.ranks[rank].coordinate, **ignored}
        return [n for n in among if {**self.ranks[n].coordinate, **ignored} == fixed]

    def axis_of(self, wrong: Iterable[int], among: Iterable[int]) -> str:
        """Returns the axis whose coordinate decides which ranks are wrong; "" if none does.

        Args:
            wrong: The ranks whose values are wrong.
            among: All ranks whose values were compared.
        """
        coordinates = {number: self.ranks[number].coordinate for number in among}
        return axis_between(coordinates, {*wrong}, self.degrees)

    def first_split_axis(self, *axes: str) -> str:
        """Returns the first of these axes with a degree above 1; "" if there is none."""
        return next((axis for axis in axes if self.degrees.get(axis, 1) > 1), "")

    def location(
        self,
        layer: str,
        phase: str,
        wrong: Collection[int],
        cause: str,
        axis: str = "",
        micro_batch: int | None = None,
        difference: float = float("inf"),
        tolerance: float = 0.0,
        among: Collection[int] = (),
    ) -> Location:
        """Returns the :class:`Location` of a difference in this step.

        Args:
            layer: The layer or parameter.
            phase: The phase of the step.
            wrong: The ranks whose values are wrong.
            cause: The likely cause, in a sentence.
            axis: The axis along which ranks are wrong; for "" it is computed.
            micro_batch: The micro-batch.
            difference: The largest relative difference.
            tolerance: The difference that rounding causes.
            among: All ranks whose values were compared, to find the axis by.
        """
        axis = axis or (self.axis_of(wrong, among) if among else "")
        position = layer, phase, axis, sorted({*wrong}), self.number, micro_batch
        return Location(*position, difference, tolerance, cause)

    def beyond_rounding(
        self,
        layer: str,
        phase: str,
        apart: Mapping[int, float],
        tolerance: float,
        cause: str,
        *axes: str,
    ) -> Location | None:
        """Returns the location of ranks that differ by more than rounding; None without such ranks.

        Args:
            layer: The layer or parameter.
            phase: The phase of the step.
            apart: By rank, the relative difference between its tensor and the one-device twin's.
            tolerance: The difference that rounding causes.
            cause: The likely cause, in a sentence.
            axes: The axes that may be named if the ranks themselves do not show the axis.
        """
        wrong = [rank for rank, far in apart.items() if not far <= tolerance]
        if not wrong:
            return None
        axis = self.axis_of(wrong, apart) or self.first_split_axis(*axes)
        worst = max(apart.values())
        return self.location(layer, phase, wrong, cause, axis, None, worst, tolerance)


def key_in_any_batch(key: TensorKey) -> TensorKey:
    """Returns a key without its step and micro-batch."""
    return key._replace(step=-1, micro_batch=-1)


class Outcome(NamedTuple):
    """The comparison of one tensor of one rank with the one-device twin's.

    Attributes:
        rank: The tensors of the rank.
        key: The key of the tensor.
        position: The position of the twin's tensor in the order in which the twin computes them.
        gap: The relative difference between the two.
        tolerance: The difference that rounding may cause.
        partial: The axis along which the ranks' tensors sum to the twin's; "" if they do not.
    """

    rank: RankTensors
    key: TensorKey
    position: float
    gap: float
    tolerance: float
    partial: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the rank's tensor is the one-device twin's, to rounding."""
        return self.gap <= self.tolerance


class LayerChecks:
    """Compares the samples of a step, the inputs and outputs of layers, and their gradients.

    Attributes:
        rows: The number of rows of a micro-batch of the one-device twin.
        waiting: The outcomes of the last tensor whose values on the ranks are wrong but add up to
            the right one, until a right tensor follows.
    """

    def __init__(self, step: StepBesideTwin, samples: SampleMatch) -> None:
        """Prepares the comparison of a step.

        Args:
            step: The records of the step.
            samples: The one-device twin's rows that each micro-batch of the job has.
        """
        self._step, self._samples = step, samples
        self.waiting: list[Outcome] | None = None
        #: The twin's tensors of the step, by key without micro-batch, then by micro-batch.
        self._by_key: dict[TensorKey, dict[int, np.ndarray]] = defaultdict(dict)
        #: By layer and role, how often the twin calls the layer in a micro-batch.
        self._calls: Counter[tuple[str, str]] = Counter()
        for key, tensor in step.twin.tensors.items():
            if key.step == step.number:
                self._by_key[key_in_any_batch(key)][key.micro_batch] = tensor
                if key.phase == "forward":
                    calls = self._calls[key.name, key.role]
                    self._calls[key.name, key.role] = max(calls, key.call + 1)
        #: By the key of an output, the keys of the inputs of its layer.
        self._sources = {p: s for p, s in step.twin.sources.items() if p.step == step.number}
        sources = self._sources.items()
        #: By layer and call, the keys of the tensors that are its inputs.
        self._inputs = {(k.name, k.call): inputs for k, inputs in sources if k.role == "output 0"}
        #: By rank, how often it calls a layer, by layer, role and micro-batch.
        self._calls_of_ranks: dict[int, Counter[tuple[str, str, int]]] = {}
        for rank in step.job.ranks:
            keys = rank.in_phase(step.number, "forward")
            self._calls_of_ranks[rank.rank] = Counter((k.name, k.role, k.micro_batch) for k in keys)
        #: How many micro-batches a replica of the job has in a step.
        self._micro_batches = 1 + max(p.micro_batch for r in step.job.ranks for p in r.tensors)
        inputs = [t for t in step.twin.in_phase(step.number, "data").values() if t.ndim]
        self.rows = len(inputs[0]) if inputs else 1

    def find_first(self, phase: str) -> Location | None:
        """Finds the first wrong input or output of a layer, in forward or in backward."""
        wrong = self.first_wrong(self.outcomes(phase))
        return None if wrong is None else self.describe(wrong)

    def outcomes(self, phase: str) -> Iterator[Outcome]:
        """Yields the comparison of each tensor of a phase that belongs to a micro-batch.

        These are samples, or the inputs and outputs of layers, or gradients, of all ranks.
        """
        for rank in self._step.job.ranks:
            for key, tensor in rank.in_phase(self._step.number, phase).items():
                if key.micro_batch >= 0 and (key.name or phase == "data"):
                    outcome = self._compare(rank, key, tensor)
                    if outcome is not None:
                        yield outcome

    def first_wrong(
        self, outcomes: Iterable[Outcome], backward: bool = False
    ) -> list[Outcome] | None:
        """Returns the outcomes, on all ranks, of the first tensor that is wrong on some rank.

        Values whose sum over the ranks is right may be summed later. They count as wrong if the
        next difference comes before a right tensor.

        Args:
            outcomes: The comparisons of all ranks.
            backward: Whether layers come first in the order, and micro-batches second.
        """
        grouped: dict[tuple[float, float, TensorKey], list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            order = (float(outcome.key.micro_batch), outcome.position)
            first, second = order[::-1] if backward else order
            grouped[first, second, outcome.key].append(outcome)
        self.waiting = None
        for order_and_key in sorted(grouped):
            of_ranks, (_, _, key) = grouped[order_and_key], order_and_key
            if all(outcome.is_right for outcome in of_ranks):
                if not key.role.startswith("input"):
                    self.waiting = None
            elif all(outcome.is_right or outcome.partial for outcome in of_ranks):
                self.waiting = self.waiting or of_ranks
            else:
                return self.waiting or of_ranks
        return None

    # One tensor

    def _compare(self, rank: RankTensors, key: TensorKey, tensor: np.ndarray) -> Outcome | None:
        """Compares a tensor of a rank with the twin's; returns None if the twin has none."""
        full_tensors = self._twin_tensors(rank, key, tensor.size)
        scale = max(map(largest_of, full_tensors), default=0.0)
        apart = [gap(*pair, scale) for pair in self._tensor_pairs(rank, key, tensor, full_tensors)]
        if not apart:
            return None
        twin_key = self._twin_key(key, key.call)
        # An input may be another layer's output, and comes after it.
        position = self._step.positions.get(twin_key, 0) + 0.5 * (twin_key.name != key.name)
        outcome = Outcome(rank, key, position, min(apart), self._step.tolerance(key, tensor))
        if outcome.is_right or key.phase == "data":
            return outcome
        for axis in _SHARDED_AXES:
            members = self._step.ranks_along(rank.rank, (axis,), self._step.ranks)
            by_member = [self._step.ranks[n].tensors.get(key) for n in members]
            tensors = [t for t in by_member if t is not None]
            if len(tensors) > 1 and len({t.shape for t in tensors}) == 1:
                total = np.sum([t.astype("float64") for t in tensors], axis=0)
                pairs = self._tensor_pairs(rank, key, total, full_tensors)
                if any(gap(t, p.astype("float64"), scale) <= outcome.tolerance for t, p in pairs):
                    return outcome._replace(partial=axis)
        return outcome

    def _tensor_pairs(
        self, rank: RankTensors, key: TensorKey, tensor: np.ndarray, full_tensors: list[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields pairs of a rank's tensor and a tensor that may be the expected one.

        The second is a shard of one of the one-device twin's ``full_tensors``. A gradient is
        divided by each factor by which it may be too large before ranks average it.
        """
        for full in full_tensors:
            for part in self._step.possible_shards(full, tensor.shape, rank.rank):
                for n in self._step.scales if key.phase == "gradient" else [1]:
                    yield (tensor / n if n > 1 else tensor), part

    def _twin_tensors(self, rank: RankTensors, key: TensorKey, size: int) -> list[np.ndarray]:
        """Returns the twin's tensors for the rows of a rank's tensor, for each possible call.

        Args:
            rank: The rank.
            key: The key of the rank's tensor.
            size: The number of elements of the rank's tensor.
        """
        calls = max(self._calls[key.name, key.role], 1)
        calls_here = self._calls_of_ranks[rank.rank][key.name, key.role, key.micro_batch]
        # A rank that makes only some of the twin's calls does not show which.
        numbers = [key.call] if calls_here in (0, calls) else range(calls)
        rows = self.twin_rows_of(rank, key.micro_batch)
        if (
            key.name
            and size == 1
            and (self._step.first_split_axis(*_SHARDED_AXES) or rows.micro_batch is None)
        ):
            # A single number depends on all rows of a micro-batch, and the rank has others.
            return []
        tensors = (self._by_key.get(self._twin_key(key, n), {}) for n in numbers)
        full_tensors = [gather_twin_rows(rows, of_key, self.rows) for of_key in tensors]
        return list(itertools.chain.from_iterable(full_tensors))

    def _twin_key(self, key: TensorKey, call: int) -> TensorKey:
        """Returns the key, in any batch, of the one-device twin's tensor for a tensor of a rank.

        An input may be recorded as another layer's output.

        Args:
            key: The key of the rank's tensor.
            call: The call of the layer on the twin.
        """
        twin_key = key_in_any_batch(key._replace(call=call))
        sources = self._inputs.get((key.name, call), [])
        # With several sources it is unknown which one the input is.
        if key.role == "input 0" and len(sources) == 1 and twin_key not in self._by_key:
            return key_in_any_batch(sources[0])
        return twin_key

    def twin_rows_of(self, rank: RankTensors, micro_batch: int) -> SampleRows:
        """Returns the one-device twin's rows with the samples of a micro-batch of a rank.

        If samples cannot be told apart, these are the twin's micro-batch at the same position.
        """
        replica = self._step.job.replica(rank)
        unknown = SampleRows((), replica * self._micro_batches + micro_batch)
        return self._samples.rows.get((replica, micro_batch), unknown)

    # The cause

    def describe(self, outcomes: list[Outcome]) -> Location:
        """Returns the location and the likely cause of a wrong tensor.

        Args:
            outcomes: The comparison on every rank that has the tensor, right ones included: which
                ranks are right shows the axis along which the others are wrong.
        """
        step, wrong = self._step, [outcome for outcome in outcomes if not outcome.is_right]
        key, ranks = wrong[0].key, [outcome.rank.rank for outcome in wrong]
        partial = next((outcome.partial for outcome in wrong if outcome.partial), "")
        axis = partial or step.axis_of(ranks, [outcome.rank.rank for outcome in outcomes])
        axis = axis or step.first_split_axis("mp", "sep", "cp", "ep")
        if key.phase == "gradient":
            layer, cause = self._blame_for_gradient(wrong[0], partial)
        else:
            layer, cause = self._blame_for_value(key, partial, axis)
            rows = self.twin_rows_of(wrong[0].rank, key.micro_batch)
            if rows.places and rows.micro_batch is None:
                axis = axis or step.first_split_axis("dp", "sharding")
                cause = locator.OTHER_ROWS
        worst = max(wrong, key=lambda outcome: outcome.gap)
        measured = key.micro_batch, worst.gap, worst.tolerance
        return step.location(layer, key.phase, ranks, cause, axis, *measured)

    def _blame_for_value(self, key: TensorKey, partial: str, axis: str) -> tuple[str, str]:
        """Returns the layer to blame for a wrong value in forward, and the cause in a sentence.

        Args:
            key: The key of the value.
            partial: The axis along which the ranks' values sum to the twin's; "" if they do not.
            axis: The axis along which ranks are wrong; "" if unknown.
        """
        layer = key.name
        if key.role.startswith("input") and "." in layer:
            # The layer around computes an input that is no layer's output.
            layer = layer.rpartition(".")[0]
        if partial:
            return layer, locator.PARTIAL[partial]
        if key.role.startswith("input"):
            return layer, f"what {layer} computes between its layers, or was sent, is another value"
        along = f": see what it does along {axis}" if axis else " from the same input"
        return layer, f"this layer computes something else{along}"

    def _blame_for_gradient(self, outcome: Outcome, partial: str) -> tuple[str, str]:
        """Returns the layer to blame for a wrong gradient of an output, and the cause.

        Args:
            outcome: The comparison of the gradient on a rank.
            partial: The axis along which the ranks' gradients sum to the twin's; "" if they do not.
        """
        key = outcome.key
        # The outermost layer first; the innermost gives its input the gradient.
        users = sorted(self._layers_using(key), key=lambda name: name.count("."))
        layer = users[-1] if users else key.name
        if partial:
            return layer, f"a missing all-reduce over {partial} in backward, of what it takes"
        if not users:
            return layer, "what comes back to its output is wrong: see what is made of that later"
        if (detached := self._find_detached_skip(outcome, users)) is not None:
            return detached
        cause = f"the backward of {layer} gives a wrong gradient to what it takes"
        return layer, cause + (f", or another use of that in {users[0]}" if users[1:] else "")

    def _find_detached_skip(self, outcome: Outcome, users: list[str]) -> tuple[str, str] | None:
        """Finds a skip connection ``x + f(x)`` of which one summand gives no gradient back.

        Without a fault ``x`` gets the gradient of the sum unchanged, plus the one through ``f``.

        Args:
            outcome: The comparison of the gradient of ``x`` on a rank.
            users: The layers that take ``x``.

        Returns:
            The layer whose output is the sum, and the cause; None without such a connection.
        """
        rank, key, tensor = outcome.rank, outcome.key, outcome.rank.tensors[outcome.key]
        full_tensors = self._twin_tensors(rank, key, tensor.size)
        pairs = list(self._tensor_pairs(rank, key, tensor, full_tensors))
        if not tensor.any():  # no gradient comes back through any summand
            return None
        # By the layer whose output may be the sum, the cause.
        matching: dict[str, str] = {}
        for other, position in self._step.positions.items():
            is_output = other.phase == "gradient" and other.role.startswith("output")
            # Backward computes the gradient of the sum before that of ``x``.
            if not is_output or position >= outcome.position:
                continue
            of_output = other._replace(step=key.step, micro_batch=key.micro_batch)
            sums = self._twin_tensors(rank, of_output, tensor.size)
            for (ours, full), of_sum in itertools.product(pairs, sums):
                scale = largest_of(full)
                # The gradient of the sum is what ``x`` lacks, or all that it gets.
                if gap(full - ours, of_sum, scale) <= outcome.tolerance:
                    matching[other.name] = locator.DETACHED_SKIP
                elif gap(ours, of_sum, scale) <= outcome.tolerance:
                    matching[other.name] = locator.DETACHED_BRANCH
        layer = min(matching, key=lambda name: (name not in users, name.count(".")), default=None)
        return None if layer is None else (layer, matching[layer])

    def _layers_using(self, key: TensorKey) -> list[str]:
        """Returns the names of the layers of the twin that take a layer's output as an input."""
        users: dict[str, None] = {}
        for user, sources in self._sources.items():
            if any((source.name, source.role) == (key.name, key.role) for source in sources):
                users[user.name] = None
        return list(users)

    def first_layer_without_input_gradient(self) -> str:
        """Returns the outermost layer that gives its inputs no gradient; "" if none.

        Of several, the first in the order of the one-device twin's backward.
        """
        # By layer and role, the outputs that have a gradient on no rank.
        number, lost = self._step.number, set[tuple[str, str]]()
        for rank in self._step.job.ranks:
            lost.update((k.name, k.role) for k in rank.in_phase(number, "forward"))
        for rank in self._step.job.ranks:
            lost.difference_update((k.name, k.role) for k in rank.in_phase(number, "gradient"))
        for key in self._step.twin.in_phase(number, "gradient"):
            if (key.name, key.role) in lost:
                users = self._layers_using(key) or [key.name]
                return min(users, key=lambda name: name.count("."))
        return ""
