"""The report of a comparison: all differences, the first of them, and which of them pass.

A place is a quantity and a layer, such as "output of 3.linear".

``Orders`` finds places where the pipeline adds up gradients in another order, which raise the
tolerance. ``Repetition`` runs each step of the reference twice on a GPU, and measures how far two
runs differ: such differences pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.compare.differences import MARGIN, QUANTITIES, ROUNDING, Difference, compare, unit_of
from fleetpipe.dygraph import (
    Crossing,
    PipelineParallel,
    SingleModel,
    reordered,
    tensor_parallel,
    tensors_of,
)
from fleetpipe.dygraph.backward.layer_state import model_kept
from fleetpipe.job.job import all_ranks
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.parity.recorded_values import Outputs, record_model
from fleetpipe.parity.reference import Reference
from fleetpipe.representation import shows

#: The largest relative difference that passes on a device that does not repeat its bits.
_LARGEST_SPREAD = 0.1

#: The tensors that a step of a reference computes, by place, as "output of 3.linear".
TensorsByPlace = dict[str, list[Tensor]]


@shows("passed", "bit_exact", "steps", "evaluations", "tolerance")
@dataclass
class Report:
    """The result of a comparison of a pipeline with its model, the same on every rank.

    Attributes:
        holds_for: The settings for which the result holds: versions and numeric environment.
        single_loss: The single-device model's loss of each step.
        pipeline_loss: The pipeline's loss of each step.
        differences: All differences, in the order of computation.
        tolerance: Largest relative difference that passes; 0 asks for the same bits.
        evaluations: Number of compared calls of ``eval_batch`` and ``predict_batch``.
        orders: The reasons why the pipeline may add gradients up in another order than one graph.
        spread: The noise of the device: by place, the relative difference of two runs of the
            reference, or the unit in the last place if larger; empty if all runs have the same
            bits.
        largest_spread: The largest relative difference of two runs, and its place.
        allowed: The rule of each entry of ``fleetpipe_configs["allow"]`` that was used.
    """

    holds_for: dict[str, str]
    single_loss: list[float] = field(default_factory=list)
    pipeline_loss: list[float] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    tolerance: float = 0.0
    evaluations: int = 0
    orders: list[str] = field(default_factory=list)
    spread: dict[str, float] = field(default_factory=dict)
    largest_spread: tuple[float, str] = (0.0, "")
    allowed: Mapping[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of steps compared."""
        return len(self.pipeline_loss)

    @property
    def passed(self) -> bool:
        """Whether no difference exceeds the tolerance."""
        return not self.failures

    @property
    def failures(self) -> list[Difference]:
        """The differences beyond the tolerance."""
        return self.beyond(self.differences)

    def beyond(self, differences: Sequence[Difference]) -> list[Difference]:
        """Returns the differences that are larger than what passes, in the same order."""
        return [one for one in differences if not one.relative <= self.limit(one)]

    def limit(self, difference: Difference) -> float:
        """Returns the largest relative difference that passes in the same quantity and layer."""
        if not self.spread:
            return self.tolerance
        # The norm, edges and the state after a step are not measured: the largest spread counts.
        place = place_of(difference.quantity, difference.name)
        size = self.spread.get(place, self.largest_spread[0])
        return max(self.tolerance, min(MARGIN * size, _LARGEST_SPREAD))

    @property
    def first_of_a_layer(self) -> Difference | None:
        """The first failure in a layer, not on an edge between two stages; None without one."""
        return next((d for d in self.failures if not d.name.startswith("edge ")), None)

    @property
    def bit_exact(self) -> bool:
        """Whether all losses, gradients, parameters and buffers have the same bits."""
        return not self._differences_of("loss", "gradient", "parameter", "buffer")

    @property
    def max_abs_diff(self) -> float:
        """Largest absolute difference of a loss."""
        return max((d.absolute for d in self._differences_of("loss")), default=0.0)

    @property
    def max_abs_param_diff(self) -> float:
        """Largest absolute difference of a parameter or a buffer, such as running statistics."""
        return max((d.absolute for d in self._differences_of("parameter", "buffer")), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, ready for JSON."""
        names = ("steps", "evaluations", "single_loss", "pipeline_loss", "max_abs_diff")
        more = ("max_abs_param_diff", "bit_exact", "passed", "tolerance", "orders", "spread")
        return {
            **{name: getattr(self, name) for name in (*names, *more)},
            "first_difference": str(self.failures[0]) if self.failures else None,
            "first_layer": str(self.first_of_a_layer) if self.first_of_a_layer else None,
            "holds_for": self.holds_for,
            "allowed": dict(self.allowed),
        }

    def verdict(self) -> str:
        """Returns the result in words; the last line says whether parity holds."""
        settings = ", ".join(f"{name}={value or 'unset'}" for name, value in self.holds_for.items())
        calls = f" and {self.evaluations} evaluations" if self.evaluations else ""
        lines = [f"parity: compared {self.steps} steps{calls} under {settings}"]
        lines += [f"parity: allowed: {entry}: {rule}" for entry, rule in self.allowed.items()]
        if self.spread:
            size, place = self.largest_spread
            lines.append(
                f"parity: this device does not repeat its bits: two runs on it alone differ by up "
                f"to {size:.2g} (relative; {place}); each passes within {MARGIN:g} times its own"
            )
        if not self.differences:
            return "\n".join([*lines, "parity: bit-exact (losses, gradients and parameters)"])
        lines += [f"parity: sums have another order: {order}" for order in self.orders]
        if self.passed:
            worst = max(difference.relative for difference in self.differences)
            limit = "what this device repeats" if self.spread else f"{self.tolerance:g}"
            within = f"parity: equal within {limit} (relative; largest {worst:.2g})"
            return "\n".join([*lines, within])
        lines.append(f"parity: first difference: {self.failures[0]}")
        if self.first_of_a_layer not in (None, self.failures[0]):
            lines.append(f"parity: first layer: {self.first_of_a_layer}")
        lines.append(
            f"parity: FAILED, largest difference {self.max_abs_diff:.3g} of a loss and "
            f"{self.max_abs_param_diff:.3g} of a parameter"
        )
        return "\n".join(lines)

    def _differences_of(self, *quantities: str) -> list[Difference]:
        """Returns the differences of some of ``QUANTITIES``."""
        return [difference for difference in self.differences if difference.quantity in quantities]


def place_of(quantity: str, name: str) -> str:
    """Returns the place of a difference, such as "output of 3.linear", without numbers of calls."""
    layer = name.partition(",")[0]
    return f"{quantity} of {layer}" if layer else quantity


def in_order(differences: Sequence[Difference], layers: Sequence[str]) -> list[Difference]:
    """Sorts the differences of one step in the order of computation.

    Args:
        differences: The differences of all ranks.
        layers: The fully qualified names of layers and their parameters, and edges, in the order
            of the model.
    """
    position = {name: index for index, name in enumerate(layers)}

    def place_in_computation(difference: Difference) -> tuple[int, int]:
        place = position.get(difference.name.partition(",")[0], len(layers))
        if difference.quantity == "gradient":
            place = -place  # gradients are computed from the loss backwards
        return QUANTITIES.index(difference.quantity), place

    return sorted(differences, key=place_in_computation)


def usual_tolerance(pipeline: PipelineParallel, reference: Reference) -> float:
    """Returns the largest relative difference that passes, unless the user gives one.

    The result is 0 if the pipeline adds up in the order of one device. :class:`Orders` may raise
    it.
    """
    if pipeline.sums_by_tree and isinstance(reference.model, SingleModel):
        return 0.0
    shards = tensor_parallel.model_parallel_group().nranks
    state = pipeline.layers.state
    # Experts on several ranks add up the tokens of all ranks by micro-batch.
    has_parts = shards > 1 or pipeline.sequence.ranks > 1
    if has_parts or state.adds_up_uses or state.spreads_experts:
        return ROUNDING
    # Gloo adds up more than two tensors in an order of its own.
    return 0.0 if pipeline.replicas.ranks <= 2 else 1e-6


class Orders:
    """Finds where the pipeline adds gradients up in another order than a single device does."""

    def __init__(self, pipeline: PipelineParallel, report: Report) -> None:
        """Prepares the search, which runs in the first two steps, and when other parameters train.

        Args:
            pipeline: The wrapped model.
            report: The report that gets the reasons, and a higher tolerance if there are any.
        """
        self._pipeline, self._report = pipeline, report
        #: The parameters that were trained in the step before.
        self._trained: frozenset[str] = frozenset()

    def recording_crossings(self) -> AbstractContextManager[dict[int, Crossing]]:
        """Returns a context that records where gradients are added up in the stages. Collective.

        It yields the record by stage, which is empty if no search is due.
        """
        parameters = self._pipeline.layers.named_parameters()
        before = self._trained
        self._trained = frozenset(name for name, p in parameters if not p.stop_gradient)
        changed = any(all_ranks().all_gather(self._trained != before))
        # The graph of a stage's first run is another: the stage finds out there what to copy.
        return self._pipeline.crossings() if changed or self._report.steps < 2 else nullcontext({})

    def report_orders(self, crossings: Mapping[int, Crossing]) -> None:
        """Reports where sums have another order, and if any do, raises the tolerance. Collective.

        Args:
            crossings: The record of :meth:`recording_crossings` for the stages of this process.
        """
        report = self._report
        # What is sent: crossings as lists, and the names of layers whose backward is split.
        plain = [(stage, crossing.plain()) for stage, crossing in crossings.items()]
        parts = all_ranks().all_gather((plain, self._pipeline.reordered_leaves()))
        everything = {stage: Crossing.from_plain(c) for part, _ in parts for stage, c in part}
        reasons = [
            f"stage {stage} hands on several tensors, whose gradients meet others'"
            for stage in reordered(everything)
        ]
        leaves = sorted({name for _, names in parts for name in names})
        reasons += [f"the backward of layer {name} is split" for name in leaves]
        report.orders += [reason for reason in reasons if reason not in report.orders]
        if report.orders:
            report.tolerance = max(report.tolerance, ROUNDING)


class Repetition:
    """Runs each step of a reference, on a GPU twice, and reports how far the two runs differ."""

    def __init__(self, reference: Reference, report: Report) -> None:
        """Takes a reference, and the report that gets the differences of its runs."""
        self._reference, self._report = reference, report
        #: As ``spread`` and ``largest_spread`` of :class:`Report`: by place, and the largest with
        #: its place.
        self._spread: dict[str, float] = {}
        self._largest = (0.0, "")

    def train(
        self, run_step: Callable[[], Nest], drawing: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Outputs, Nest]:
        """Runs forward and backward of a step: once on a CPU, which repeats its bits.

        On any other device the step runs twice from the same state, and the two runs are compared;
        this is collective over the job, of which each rank has a reference.

        Args:
            run_step: Runs forward and backward once, and returns the loss.
            drawing: Returns the context that sets the step's random streams.

        Returns:
            The outputs of layers, and the loss; of two runs those of the second.
        """
        model = self._reference.model

        def run() -> tuple[Outputs, Nest]:
            with drawing(), record_model(model, self._reference.names) as outputs:
                return outputs, run_step()

        if device_kind() == "cpu":
            return run()
        # The first run leaves no trace: its gradients and the layers' new state are dropped.
        with model_kept(model.sublayers(include_self=True), model.parameters()):
            first = self._values_of(*run())
        outputs, loss = run()
        self._compare(first, outputs, loss)
        return outputs, loss

    def _compare(self, first: TensorsByPlace, outputs: Outputs, loss: Nest) -> None:
        """Reports where the second run of a step differs from the first. Collective."""
        for place, tensors in self._values_of(outputs, loss).items():
            for one, other in zip(tensors, first.get(place, ())):
                size = unit_of(one.dtype) if one.is_floating_point() else 0.0
                if difference := compare("output", place, 0, one, other):
                    size = max(size, difference.relative)
                    self._largest = max(self._largest, (difference.relative, place))
                self._spread[place] = max(size, self._spread.get(place, 0.0))
        for largest, spread in all_ranks().all_gather((self._largest, self._spread)):
            self._largest = max(self._largest, tuple(largest))
            for place, size in spread.items():
                self._spread[place] = max(size, self._spread.get(place, 0.0))
        if self._largest[0]:
            self._report.spread, self._report.largest_spread = self._spread, self._largest

    def _values_of(self, outputs: Outputs, loss: Nest) -> TensorsByPlace:
        """Returns outputs of layers, loss and copies of gradients, by quantity and layer."""
        computed = {place_of("output", layer): tensors for layer, tensors in outputs.items()}
        computed["loss"] = list(tensors_of(loss))
        gradients = self._reference.gradients().items()
        return {**computed, **{place_of("gradient", n): [grad.clone()] for n, grad in gradients}}
