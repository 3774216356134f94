"""What passes: another order of sums, and what a device does not repeat.

On a GPU each step of the reference runs twice, which measures whether it repeats its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.compare.differences import compare, unit_of
from fleetpipe.compare.rounding import ROUNDING
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
from fleetpipe.parity.outputs import Outputs, record_model
from fleetpipe.parity.reference import Reference
from fleetpipe.parity.report import Report, place_of

#: What a step of a reference computes, by place.
Computed = dict[str, list[Tensor]]


def usual_tolerance(pipeline: PipelineParallel, reference: Reference) -> float:
    """Returns the default tolerance; :class:`Orders` may raise it in a step."""
    if pipeline.sums_by_tree and isinstance(reference.model, SingleModel):
        return 0.0
    shards = tensor_parallel.model_parallel_group().nranks
    state = pipeline.layers.state
    # An expert adds up the tokens of all ranks by micro-batch.
    several = shards > 1 or pipeline.sequence.ranks > 1
    if several or state.adds_up_uses or state.spreads_experts:
        return ROUNDING
    # Gloo adds up more than two in an order of its own.
    return 0.0 if pipeline.replicas.ranks <= 2 else 1e-6


class Orders:
    """Finds places where the pipeline adds gradients up in another order than one graph."""

    def __init__(self, pipeline: PipelineParallel, report: Report) -> None:
        """Prepares the search, which runs in the first steps and when other parameters train.

        Args:
            pipeline: The wrapped model.
            report: Gets the reasons, and a higher tolerance if there are any.
        """
        self._pipeline, self._report = pipeline, report
        self._trained: frozenset[str] = frozenset()

    def crossings(self) -> AbstractContextManager[dict[int, Crossing]]:
        """While it is open, the graphs of the stages are recorded, if a search is due.

        Collective.
        """
        parameters = self._pipeline.layers.named_parameters()
        before = self._trained
        self._trained = frozenset(name for name, p in parameters if not p.stop_gradient)
        changed = any(all_ranks().all_gather(self._trained != before))
        # In its first run a stage has a graph of its own: it finds out what it has to copy.
        return self._pipeline.crossings() if changed or self._report.steps < 2 else nullcontext({})

    def note(self, crossings: Mapping[int, Crossing]) -> None:
        """Reports the places found in ``crossings``, and raises the tolerance. Collective.

        Args:
            crossings: The record of :meth:`crossings` for the stages of this process.
        """
        report = self._report
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
    """Compares two runs of a reference's step."""

    def __init__(self, reference: Reference, report: Report) -> None:
        self._reference, self._report = reference, report
        self._spread: dict[str, float] = {}
        self._largest = (0.0, "")

    def train(
        self, train: Callable[[], Nest], drawing: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Outputs, Nest]:
        """Runs a step, on a GPU twice. Collective there; a CPU repeats its bits.

        Args:
            train: Runs the step forward and backward, and returns the loss.
            drawing: Returns the context that sets its random streams.

        Returns:
            The outputs of layers, and the loss.
        """
        model = self._reference.model

        def run() -> tuple[Outputs, Nest]:
            with drawing(), record_model(model, self._reference.names) as outputs:
                return outputs, train()

        if device_kind() == "cpu":
            return run()
        with model_kept(model.sublayers(include_self=True), model.parameters()):
            first = self._values_of(*run())
        outputs, loss = run()
        self._compare(first, outputs, loss)
        return outputs, loss

    def _compare(self, first: Computed, outputs: Outputs, loss: Nest) -> None:
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

    def _values_of(self, outputs: Outputs, loss: Nest) -> Computed:
        computed = {place_of("output", layer): tensors for layer, tensors in outputs.items()}
        computed["loss"] = list(tensors_of(loss))
        gradients = self._reference.gradients().items()
        return {**computed, **{place_of("gradient", n): [grad.clone()] for n, grad in gradients}}
