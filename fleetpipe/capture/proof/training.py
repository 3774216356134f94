"""One training of a model, moment by moment, run by the plain loop or by the stages.

A training is a few steps of micro-batches, each with an optimizer, then evaluations. Its results
are yielded one by one, so that two trainings can be compared while they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from fleetpipe.aliases import Layer, Nest, Optimizer, Tensor
from fleetpipe.dygraph.gradients import dense, drop_gradients
from fleetpipe.dygraph.nest import differentiable, map_tensors, tensors_of
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import state_slots
from fleetpipe.paddle_api.tensor import has_memory
from fleetpipe.schedules import Schedule

#: So small that a step changes the bits of a parameter and not what a layer does.
RATE = 0.05


class TrainedStep(NamedTuple):
    """One step of a training.

    Attributes:
        micro_batches: The inputs of each micro-batch.
        schedule: The schedule that the stages run.
        optimizer: The class of the optimizer that takes the step.
        draw: The seed of its random numbers, as the number of a batch is.
    """

    micro_batches: Sequence[Nest]
    schedule: Schedule
    optimizer: type[Optimizer]
    draw: int


class Course(NamedTuple):
    """The steps and evaluations of a training.

    Attributes:
        steps: The steps, in order.
        evaluations: The inputs on which the model is evaluated afterwards.
    """

    steps: Sequence[TrainedStep]
    evaluations: Sequence[Nest]


class Moment(NamedTuple):
    """The results of a training at one moment.

    Attributes:
        quantity: "output", "gradient", "state" (parameters and buffers) or "mode".
        step: The number of the step; the evaluation counts as one more.
        tensors: The tensors by name. Names of outputs have the number of the micro-batch.
        modes: By path, whether a layer is in training.
    """

    quantity: str
    step: int
    tensors: dict[str, Tensor]
    modes: dict[str, bool]

    def clone_tensors(self) -> Moment:
        """Returns a copy with tensors that the training does not change."""
        copies = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return self._replace(tensors=copies)


class Side(Protocol):
    """One side of a comparison, which runs the model itself or its stages."""

    def train(self, step: TrainedStep) -> list[Nest]:
        """Adds the gradients of all micro-batches to the parameters; returns the outputs."""

    def evaluate(self, inputs: Nest) -> Nest:
        """Returns the output for one micro-batch."""


def moments(model: Layer, side: Side, course: Course) -> Iterator[Moment]:
    """Trains a model in place, and yields the moments of the training.

    The caller may change the model's values between two moments.

    Args:
        model: The model, whose own ``train`` and ``eval`` set the modes.
        side: Runs the model.
        course: The steps and evaluations to run.
    """
    parameters = list(dict.fromkeys(p for p in model.parameters() if not p.stop_gradient))
    for number, step in enumerate(course.steps):
        drop_gradients(model.parameters())
        model.train()
        outputs = side.train(step)
        yield Moment("output", number, _number_outputs(outputs, "micro-batch"), {})
        del outputs
        yield Moment("gradient", number, gradients_of(model), {})
        if all(bool(paddle.isfinite(gradient).all()) for gradient in gradients_of(model).values()):
            _update(step, parameters)
        yield Moment("state", number, state_of_model(model), _modes(model))
    drop_gradients(model.parameters())
    model.eval()
    end = len(course.steps)
    for number, inputs in enumerate(course.evaluations):
        output = side.evaluate(map_tensors(lambda tensor: tensor.clone(), inputs))
        yield Moment("output", end, _number_outputs([output], "evaluation", number), {})
        yield Moment("state", end, state_of_model(model), _modes(model))


def _update(step: TrainedStep, parameters: Sequence[Tensor]) -> None:
    """Makes a separate optimizer step of each parameter, whose state needs less memory."""
    # Names of an optimizer's state are counted: the user's are to be those of a first optimizer.
    with paddle.utils.unique_name.guard():
        for parameter in parameters:
            if parameter.grad is not None:
                step.optimizer(RATE, parameters=[parameter]).step()
                drop_gradients([parameter])


def gradients_of(model: Layer) -> dict[str, Tensor]:
    """Returns the gradients of a model's parameters by name, for those that have one."""
    return {n: dense(p.grad, p) for n, p in model.named_parameters() if p.grad is not None}


def state_of_model(model: Layer) -> dict[str, Tensor]:
    """Returns all parameters and buffers of a model by name, also those of no state dict."""
    buffers = {
        f"{path}.{name}" if path else name: holder[name]
        for path, layer in model.named_sublayers(include_self=True)
        for holder, name in state_slots(layer)
        if has_memory(holder[name])
    }
    return {**dict(model.named_parameters()), **buffers}


def loss_of(output: Nest) -> Tensor:
    """Returns a weighted sum of all numbers that a model returns, each with another weight.

    Backward may start from it even if no output depends on a trained parameter.
    """
    total = paddle.zeros([])
    total.stop_gradient = False
    for tensor in differentiable(output, roots=True):
        real = paddle.as_real(tensor) if tensor.is_complex() else tensor
        if real.size:
            total = total + (real.astype("float32") * _weights(tuple(real.shape))).mean()
    return total


def weights_of(step: TrainedStep) -> list[Fraction]:
    """Returns the weight of each micro-batch in the loss of a step."""
    count = len(step.micro_batches)
    return [Fraction(1, count)] * count


@cache
def _weights(shape: tuple[int, ...]) -> Tensor:
    # A short list, repeated: a large output is not to need as many random numbers.
    numbers = np.random.default_rng(0).uniform(0.5, 1.5, 997).astype("float32")
    return paddle.to_tensor(np.resize(numbers, shape))


def _number_outputs(outputs: Sequence[Nest], what: str, first: int = 0) -> dict[str, Tensor]:
    return {
        f"{index} of {what} {number}": tensor
        for number, output in enumerate(outputs, first)
        for index, tensor in enumerate(tensors_of(output))
    }


def _modes(model: Layer) -> dict[str, bool]:
    return {path: layer.training for path, layer in model.named_sublayers(include_self=True)}
