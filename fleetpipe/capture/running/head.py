"""What a captured model asks of a head in parts, an extra: ``fleetpipe.contrib.vocabulary``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture.running.stages import CapturedStages
from fleetpipe.capture.running.variants import Forms
from fleetpipe.capture.tracing.value import Capture, Node
from fleetpipe.dygraph.layers.run_stage import StageRunner
from fleetpipe.schedules import Placement


class Head(Protocol):
    """Stands in the place of a model's last layer; its parts are stages behind those of the model.

    Attributes:
        description: The entry that it would be in a list of layers.
        counted_names: Paddle's names of the layer's parameters, by their names in the model.
    """

    description: Any
    counted_names: Mapping[str, str]

    @property
    def parts(self) -> Sequence[Layer]:
        """The parts, in order."""

    @property
    def names(self) -> list[str]:
        """The names of :meth:`functions` in a profile and in a plan."""

    def functions(self) -> list[Callable[[Nest], Nest]]:
        """Returns what runs the stages behind those of the model."""

    def nodes(self, number: int) -> list[Node]:
        """Returns the nodes of the stage ``number`` behind those of the model."""

    def require_last(self, *traces: Capture) -> None:
        """Refuses a model that does something with the layer's output."""

    def stages(
        self, forms: Forms, training: Callable[[], bool], runner: StageRunner, placement: Placement
    ) -> CapturedStages:
        """Returns the stages of the model, and behind them its own, which ``runner`` runs."""


def loss_input(model: Layer, output: Nest) -> Nest:
    """Returns what the loss of a plain model takes: its output, deferred if it has a head."""
    heads: list[Any] = [one for one in model.sublayers() if hasattr(one, "defer_logits")]
    return heads[0].defer_logits(output) if heads else output
