"""The dynamic-graph stage: runs forward and backward of the model's stages with autograd."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Callable

from fleetpipe._paddle import paddle
from fleetpipe.dygraph.micro_batches import MicroBatches
from fleetpipe.dygraph.split_backward import SplitBackward
from fleetpipe.dygraph.values import differentiable, outline
from fleetpipe.engine import Values
from fleetpipe.errors import BoundaryError
from fleetpipe.schedules import Edge
from fleetpipe.transport import Value

Criterion = Callable[[Any, Any], Any]


class Batch:
    """What one run of a plan works on, and what it leaves: losses or outputs by micro-batch."""

    def __init__(
        self,
        data: MicroBatches,
        weights: list[Fraction],
        criterion: Criterion | None,
        scale: Callable[[Any], Any] | None = None,
    ) -> None:
        """Describes one batch.

        Args:
            data: The micro-batches this rank was given.
            weights: The weight of each micro-batch in the loss.
            criterion: ``criterion(output, label)`` gives the loss; None collects the outputs.
            scale: Applied to the weighted loss before backward, as a ``GradScaler``'s ``scale``.
        """
        self.data = data
        self.weights = weights
        self.criterion = criterion
        self.scale = scale
        self.losses: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}

    def total_loss(self) -> Any:
        """Returns the sum of the weighted losses in micro-batch order, detached."""
        shares = [self.losses[index] for index in sorted(self.losses)]
        total = shares[0]
        for loss in shares[1:]:
            total = total + loss
        return total


class DygraphStage:
    """Implements the engine's ``Stage`` for the stages of a ``PipelineLayer``.

    What a stage received and what it returned are kept from forward to backward; the received
    tensors that need a gradient are leaves, so that autograd ends at the stage's border.
    """

    def __init__(
        self,
        run_stage: Callable[[int, Any, int], Any],
        edges: tuple[Edge, ...],
        split: SplitBackward,
    ) -> None:
        """Serves the stages of a chain.

        Args:
            run_stage: ``run_stage(stage, value, micro_batch)`` runs the layers of a stage.
            edges: The edges of the plan; in dynamic graph each stage has at most one on each side.
            split: Keeps what weight gradients need from I to W.
        """
        self._run_stage = run_stage
        self._split = split
        self._into = {edge.target: edge for edge in edges}
        self._out = {edge.source: edge for edge in edges}
        self._kept: dict[tuple[int, int], tuple[Value, Any]] = {}
        self._batch = Batch(MicroBatches(None, None), [], None)
        self._first_micro_batch = 0

    def begin(self, batch: Batch, first_micro_batch: int = 0) -> None:
        """Takes up a batch whose micro-batch 0 has the given global number."""
        self._batch = batch
        self._first_micro_batch = first_micro_batch
        self._kept.clear()
        self._split.begin()

    def forward(self, stage: int, micro_batch: int, inputs: Values) -> Values:
        """Runs the layers of ``stage``; the last stage also computes the loss."""
        into = self._into.get(stage)
        value = self._inputs_of(micro_batch) if into is None else inputs[into]
        with self._split.recording(stage, micro_batch - self._first_micro_batch):
            output = self._run_stage(stage, value, micro_batch)
        if stage in self._out:
            self._kept[stage, micro_batch] = (value, output)
            return {self._out[stage]: output}
        self._kept[stage, micro_batch] = (value, self._finish(micro_batch, output))
        return {}

    def backward(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """Runs autograd from the outputs, or from the loss, back to what the stage received."""
        value, output = self._kept[stage, micro_batch]
        if stage in self._out:
            _backward(differentiable(output), output_grads[self._out[stage]])
        else:
            output.backward()
        if stage not in self._into:
            return {}
        return {self._into[stage]: tuple(leaf.grad for leaf in differentiable(value))}

    def input_grad(self, stage: int, micro_batch: int, output_grads: Values) -> Values:
        """As :meth:`backward`, but the gradients of leaf layers' parameters wait for W.

        Everything but what they need is dropped here.
        """
        with self._split.input_grads(stage, micro_batch - self._first_micro_batch):
            grads = self.backward(stage, micro_batch, output_grads)
        del self._kept[stage, micro_batch]
        return grads

    def weight_grad(self, stage: int, micro_batch: int) -> None:
        """Adds the gradients that waited."""
        self._split.weight_grads(stage, micro_batch - self._first_micro_batch)

    def release(self, stage: int, micro_batch: int) -> None:
        """Drops the activations of a stage and micro-batch."""
        self._kept.pop((stage, micro_batch), None)
        self._split.release(stage, micro_batch - self._first_micro_batch)

    def _inputs_of(self, micro_batch: int) -> Any:
        return self._batch.data.inputs[micro_batch - self._first_micro_batch]

    def _finish(self, micro_batch: int, output: Any) -> Any:
        """Turns the last stage's output into the loss to start backward from."""
        batch = self._batch
        index = micro_batch - self._first_micro_batch
        if batch.criterion is None:
            batch.outputs[index] = output
            return output
        loss = _loss(batch.criterion, output, batch.data.labels[index])
        share = weighted(loss, batch.weights[index])
        batch.losses[index] = share.detach()
        return share if batch.scale is None else batch.scale(share)


def _loss(criterion: Criterion, output: Any, label: Any) -> Any:
    try:
        loss = criterion(output, label)
    except Exception as error:
        raise BoundaryError(
            "the loss function cannot take the model's output and the label",
            where="last stage",
            got=f"output {outline(output)}; label {outline(label)}",
            cause=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}",
        ) from error
    # Not loss.size: Paddle asks NumPy for that, which takes as long as the loss of a small model.
    if isinstance(loss, paddle.Tensor) and math.prod(loss.shape) == 1:
        return loss
    raise BoundaryError(
        "loss_fn(output, label) must return a Tensor with one element",
        where="last stage",
        got=outline(loss) if isinstance(loss, paddle.Tensor) else type(loss).__name__,
        fix="reduce the loss, e.g. with paddle.mean",
    )


def weighted(loss: Any, weight: Fraction) -> Any:
    """Returns a micro-batch's share of the loss of the batch."""
    # A quotient, not a product with 1/m: this is what a hand-written accumulation loop does,
    # and the two differ in the last bit where m is not a power of two.
    if weight.numerator != 1:
        loss = loss * weight.numerator
    if weight.denominator != 1:
        loss = loss / weight.denominator
    return loss


def _backward(tensors: list[Any], grads: tuple[Any, ...]) -> None:
    """Runs autograd from ``tensors``; a tensor that left twice gets the sum of its gradients."""
    roots: dict[int, tuple[Any, Any]] = {}
    for tensor, grad in zip(tensors, grads):
        # None: the next stage did not use the tensor. Paddle would take None for a gradient of one.
        if grad is not None:
            known = roots.get(id(tensor))
            roots[id(tensor)] = (tensor, grad if known is None else known[1] + grad)
    if roots:
        paddle.autograd.backward(*map(list, zip(*roots.values())))
