"""Measures whether a device repeats its bits: on a GPU each step of the reference runs twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.compare.differences import compare, unit_of
from fleetpipe.dygraph import tensors_of
from fleetpipe.dygraph.backward.layer_state import model_kept
from fleetpipe.dygraph.gradients import dense
from fleetpipe.job.job import all_ranks
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.parity.outputs import Outputs, record_model
from fleetpipe.parity.reference import Reference
from fleetpipe.parity.report import Report, place_of

#: What a step of a reference computes, by place.
Computed = dict[str, list[Tensor]]


class Repetition:
    """Compares two runs of a reference's step."""

    def __init__(self, reference: Reference, report: Report) -> None:
        self._reference, self._report = reference, report
        self._spread: dict[str, float] = {}
        self._largest = (0.0, "")

    def run(
        self, train: Callable[[], Nest], drawing: Callable[[], AbstractContextManager[None]]
    ) -> Computed | None:
        """Returns the values of a step, and undoes it; None on a CPU, which repeats its bits.

        Args:
            train: Runs the step forward and backward, and returns the loss.
            drawing: Returns the context that sets its random streams.
        """
        if device_kind() == "cpu":
            return None
        model = self._reference.model
        layers = model.sublayers(include_self=True)
        kept = model_kept(layers, model.parameters())
        with kept, drawing(), record_model(model, self._reference.names) as outputs:
            return self._values_of(outputs, train())

    def compare(self, first: Computed | None, outputs: Outputs, loss: Nest) -> None:
        """Reports where the second run of a step differs from the first. Collective on a GPU."""
        if first is None:
            return
        for place, tensors in self._values_of(outputs, loss).items():
            for one, other in zip(tensors, first.get(place, ())):
                size = unit_of(one) if one.is_floating_point() else 0.0
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
        for name, p in self._reference.model.named_parameters():
            if p.grad is not None:
                place = place_of("gradient", self._reference.names[name])
                computed[place] = [dense(p.grad, p).clone()]
        return computed
