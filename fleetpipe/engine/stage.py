"""The interface of a stage, which dynamic and static graph implement once each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fleetpipe.schedules import Edge
from fleetpipe.schedules.action import GlobalMicroBatch
from fleetpipe.transport import Value

#: The values of a stage's incoming or outgoing edges, or their gradients, by edge.
Values = Mapping[Edge, Value]


class Stage(Protocol):
    """Runs the compute actions of the stages a process owns.

    Stages are global numbers along the model; micro-batches are global too, because random streams
    are keyed by them.
    """

    def forward(self, stage: int, micro_batch: GlobalMicroBatch, inputs: Values) -> Values:
        """Computes the value of every edge out of ``stage``, and stores what its backward needs.

        Args:
            stage: The global stage.
            micro_batch: The global micro-batch.
            inputs: The value of every edge into ``stage``: nested tuples, lists and dicts of
                tensors and plain values. The first stage has none and takes the user's data.

        Returns:
            The value of every edge out of ``stage``; none for the last stage, which keeps a loss.
        """

    def backward(self, stage: int, micro_batch: GlobalMicroBatch, output_grads: Values) -> Values:
        """Adds to the parameters' gradients; returns the gradient of every edge into ``stage``.

        Args:
            stage: The global stage.
            micro_batch: The global micro-batch.
            output_grads: For every edge out of ``stage`` a tuple: the gradient of each tensor that
                needs one, in order, None where the consumer did not use it.

        Returns:
            The same for every edge into ``stage``.
        """

    def input_grad(self, stage: int, micro_batch: GlobalMicroBatch, output_grads: Values) -> Values:
        """As :meth:`backward`, but leaves the parameters' gradients to :meth:`weight_grad`."""

    def weight_grad(self, stage: int, micro_batch: GlobalMicroBatch) -> None:
        """Adds the gradients that :meth:`input_grad` left out to those of the parameters."""

    def release(self, stage: int, micro_batch: GlobalMicroBatch) -> None:
        """Drops the activations that :meth:`forward` stored for this stage and micro-batch."""
