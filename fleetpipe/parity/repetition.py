"""Whether a device repeats its bits: on a GPU the reference of each step runs a second time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import tensors_of
from fleetpipe.dygraph.gradients import dense
from fleetpipe.job.job import all_ranks
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.parity.differences import compare
from fleetpipe.parity.edges import state_kept, unit
from fleetpipe.parity.outputs import Outputs, recorded
from fleetpipe.parity.reference import Reference
from fleetpipe.parity.report import Report, place_of

#: What a run of the reference computes, by quantity and name.
Computed = dict[tuple[str, str], list[Tensor]]


class Repetition:
    """Compares a reference with itself, before a pipeline is compared with it."""

    def __init__(self, reference: Reference, report: Report) -> None:
        self._reference, self._report = reference, report
        self._spread: dict[str, float] = {}
        self._worst = (0.0, "")

    def run(
        self, train: Callable[[], Nest], drawing: Callable[[], AbstractContextManager[None]]
    ) -> Computed | None:
        """Runs a step forward and backward and leaves nothing of it behind.

        Args:
            train: Runs it, and returns the loss.
            drawing: Makes the context in which the numbers of this step are drawn.

        Returns:
            What the step computes; None on a CPU, which repeats its bits.
        """
        if device_kind() == "cpu":
            return None
        model = self._reference.model
        with state_kept(model), drawing(), recorded(model, self._reference.names) as outputs:
            return self._computed(outputs, train())

    def compare(self, first: Computed | None, outputs: Outputs, loss: Nest) -> None:
        """Notes where the run that counts differs from the first. Collective on a GPU."""
        if first is None:
            return
        for (quantity, name), tensors in self._computed(outputs, loss).items():
            place = place_of(quantity, name)
            for one, other in zip(tensors, first.get((quantity, name), ())):
                difference = compare(quantity, name, self._report.steps, one, other)
                size = unit(one) if one.is_floating_point() else 0.0
                if difference:
                    self._worst = max(self._worst, (difference.relative, place))
                    size = max(size, difference.relative)
                self._spread[place] = max(size, self._spread.get(place, 0.0))
        for worst, spread in all_ranks().all_gather((self._worst, self._spread)):
            self._worst = max(self._worst, tuple(worst))
            for place, size in spread.items():
                self._spread[place] = max(size, self._spread.get(place, 0.0))
        if self._worst[0]:
            self._report.spread, self._report.largest_spread = self._spread, self._worst

    def _computed(self, outputs: Outputs, loss: Nest) -> Computed:
        names = self._reference.names
        return {
            **{("output", layer): tensors for layer, tensors in outputs.items()},
            ("loss", ""): list(tensors_of(loss)),
            **{
                ("gradient", names[name]): [dense(p.grad, p).clone()]
                for name, p in self._reference.model.named_parameters()
                if p.grad is not None
            },
        }
