"""Compares the moments of two trainings of one model, the second as it runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.proof.rounding import Rounding, distance, move_by_a_unit, same_bits, ulp
from fleetpipe.capture.proof.sides import PlainLoop
from fleetpipe.capture.proof.training import RATE, Course, Moment, Step, state_of_model
from fleetpipe.capture.tracing.capturing import in_mode
from fleetpipe.capture.tracing.python_state import python_state_kept
from fleetpipe.capture.tracing.tracer import state_kept
from fleetpipe.dygraph.gradients import drop_gradients


@contextmanager
def kept(model: Layer) -> Iterator[None]:
    """Puts back everything that a training changes, and leaves no gradients."""
    parameters = [(p, p.detach().clone(), p.stop_gradient) for p in model.parameters()]
    with python_state_kept(model), state_kept(model), in_mode(model, model.training):
        try:
            yield
        finally:
            drop_gradients(model.parameters())
            for parameter, value, stop_gradient in parameters:
                if not same_bits(parameter, value):
                    with paddle.no_grad():
                        parameter.set_value(value)
                parameter.stop_gradient = stop_gradient


class Comparison:
    """What the second training is compared with, step by step.

    Attributes:
        rounded: By parameter, how far its gradient is off by the order of a sum, over the largest
            gradient of its layer.
    """

    def __init__(self, model: Layer, plain: PlainLoop, course: Course) -> None:
        """Begins before the second training.

        Args:
            model: The model, as both begin.
            plain: What ran first.
            course: What both run.
        """
        self.rounded: dict[str, float] = {}
        self._model, self._plain, self._course = model, plain, course
        self._start: Mapping[str, Tensor] = {
            name: tensor.detach().clone() for name, tensor in state_of_model(model).items()
        }
        #: By parameter, how far the gradient of the step is off.
        self._off: dict[str, float] = {}

    def differences(self, moment: Moment, right: Moment) -> list[str]:
        """Compares a moment; returns what differs by more than its place carries, by name.

        After a step the model takes the values of the first training.
        """
        names = {**right.tensors, **moment.tensors}
        off = {n: distance(moment.tensors.get(n), right.tensors.get(n)) for n in names}
        off = {name: gap for name, gap in off.items() if gap}
        differing = list(off)
        if moment.quantity == "gradient":
            self._off = off
            differing = self._beyond_rounding(off, right)
        if moment.quantity == "state":
            differing = [name for name in off if off[name] > self._of_update(name, right)]
            self._give(right.tensors)
        modes = [path for path, mode in right.modes.items() if moment.modes.get(path) != mode]
        return differing + [f"the mode of {path or 'the model'}" for path in modes]

    def _beyond_rounding(self, off: Mapping[str, float], right: Moment) -> list[str]:
        step = self._course.steps[right.step]
        rounding = Rounding(right.tensors, functools.partial(self._gradients_beside, step))
        beyond = [name for name, gap in off.items() if not rounding.carries(name, gap)]
        for name in off.keys() - set(beyond):
            share = off[name] / (rounding.scale(name) or 1.0)
            self.rounded[name] = max(share, self.rounded.get(name, 0.0))
        return beyond

    def _of_update(self, name: str, right: Moment) -> float:
        """Returns how far a step puts a parameter off whose gradient is off."""
        gap = self._off.get(name, 0.0)
        return 2 * RATE * gap + 2 * ulp(right.tensors[name]) if gap else 0.0

    def _gradients_beside(self, step: Step) -> dict[str, Tensor]:
        """Returns the plain model's gradients of a step that starts a unit in the last place off.

        What the second training has by now stays as it is.
        """
        parameters = [p for p in self._model.parameters() if not p.stop_gradient]
        gradients = [(parameter, parameter.grad) for parameter in parameters]
        with kept(self._model):
            self._give(self._start)
            move_by_a_unit(parameters)
            drop_gradients(parameters)
            self._plain.train(step)
            moved = {
                name: parameter.grad.clone()
                for name, parameter in self._model.named_parameters()
                if parameter.grad is not None
            }
        for parameter, gradient in gradients:
            if gradient is not None:
                parameter.grad = gradient
        return moved

    def _give(self, state: Mapping[str, Tensor]) -> None:
        self._start = state
        with paddle.no_grad():
            for name, tensor in state_of_model(self._model).items():
                if name in state and not same_bits(tensor, state[name]):
                    tensor.set_value(state[name])
