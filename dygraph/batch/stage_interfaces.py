"""The protocols of the objects that a dynamic-graph stage works with, and its :class:`Batch`.

``dygraph_stage.py`` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.losses import Criterion, Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.units import Borders
from fleetpipe.schedules.action import GlobalMicroBatch

#: ``run_of(stage)(value, micro_batch)`` runs the layers of a stage on ``value``.
RunOf = Callable[[int], Callable[[Nest, GlobalMicroBatch], Nest]]

#: A gradient, or None, for each tensor of a value that needs one. None stands for the gradients of
#: the loss, and of the inputs of the model.
Gradients = tuple[Tensor, ...] | None


class Batch:
    """The data of one run of a plan, and its results: losses or the outputs of micro-batches."""

    def __init__(
        self,
        data: MicroBatches,
        losses: Losses | None = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        elsewhere: Sequence[Criterion] = (),
        value_of: Callable[[Nest], Nest] | None = None,
    ) -> None:
        """Describes one batch.

        Args:
            data: The micro-batches of this rank.
            losses: Computes and stores the losses; None to collect the outputs instead.
            scale: Called with the weighted loss before backward, as ``scale`` of a GradScaler.
            elsewhere: The loss functions that run on another rank and might read tensors that
                layers on this rank store.
            value_of: Returns the part of the last layer's output to collect; None for all of it.
        """
        self.data = data
        self.losses = losses
        self.scale = scale
        self.elsewhere = elsewhere
        self._value_of = value_of
        self.outputs: dict[int, Nest] = {}

    def collect(self, index: int, output: Nest) -> None:
        """Stores the last layer's output for the micro-batch with number ``index``."""
        self.outputs[index] = output if self._value_of is None else self._value_of(output)

    def ordered_outputs(self) -> list[Nest]:
        """Returns the outputs in the order of the micro-batches, whatever order they ran in."""
        return [self.outputs[index] for index in sorted(self.outputs)]


class StageHooks(Protocol):
    """The functions that a stage calls around its forwards and backwards.

    ``stage`` is always the global number of the stage.
    """

    def before_forward(self, stage: int, value: Nest) -> None:
        """Called before F with the stage's input: a received value, or the inputs of the batch."""

    def after_forward(self, stage: int, value: Nest, output: Nest) -> None:
        """Called after F with the stage's input, and with the output of the stage's last layer."""

    def before_backward(
        self, stage: int, value: Nest, output: Nest, output_grads: Gradients
    ) -> None:
        """Called before B or I with the stage's values, and the gradients that came for its output.

        The output of the last stage is the loss.
        """

    def after_backward(
        self, stage: int, value: Nest, output: Nest, output_grads: Gradients, input_grads: Gradients
    ) -> None:
        """Called after B or I, also with the gradients of the stage's input; None for stage 0."""

    def before_weight_grad(self, stage: int) -> None:
        """Called before action W, which adds the delayed weight gradients."""


class StageWatch(Protocol):
    """Finds a stage that uses values or parameters of others beside what it receives."""

    @property
    def watches(self) -> bool:
        """Whether there is anything to find, so that the methods must be called in a batch."""

    def enter(self, stage: int, forward: bool) -> None:
        """Called before each action of a stage; ``forward`` tells whether the action is F."""

    def leave(self, ends: bool = False) -> None:
        """Called when no stage runs any more; ``ends`` is True at the end of the batch."""

    def refused(self) -> AbstractContextManager[None]:
        """Returns a context whose errors name a use of another stage's values, if there was any."""


class StagesToRun(Protocol):
    """The stages that a process runs, and their layers."""

    @property
    def borders(self) -> Borders | None:
        """Translates between the values of layers and those on edges; None for a list of layers."""

    def function(self, stage: int) -> Callable[[Nest, GlobalMicroBatch], Nest]:
        """Returns the function that runs the layers of a stage."""

    def layers(self, stage: int) -> Mapping[int, Callable[[Nest], Nest]]:
        """Returns the layers and functions of a stage, by their numbers in the whole list."""
