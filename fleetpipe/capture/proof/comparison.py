"""Compares two trainings of one model, the second while it runs, with the memory of one.

It keeps only digests of the first training. If bits differ, and rounding may be the reason, the
first training runs once more for its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.proof import training
from fleetpipe.capture.tracing.capturing import in_mode
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.compare.differences import digest_of, largest_gap, largest_of, same_bits, unit_of
from fleetpipe.compare.rounding import Rounding, move_by_a_unit
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.operations import set_data
from fleetpipe.paddle_api.tensor import copy_of

#: The parameters and buffers of a model by name.
State = Mapping[str, Tensor]


@contextmanager
def undo_training(model: Layer) -> Iterator[None]:
    """While it is open, a training may change a model; then its state is restored."""
    with state_kept(model), in_mode(model, model.training):
        try:
            yield
        finally:
            drop_gradients(model.parameters())


def give(model: Layer, state: State) -> None:
    """Sets a model's values from a state, whose tensors it copies."""
    with paddle.no_grad():
        for name, tensor in training.state_of_model(model).items():
            if name in state and not same_bits(tensor, state[name]):
                # A buffer may have got another length.
                set_data(tensor, state[name].detach().clone())


class Digests:
    """The digests of all moments of a plain training.

    Attributes:
        moments: All moments, with digests in the place of tensors.
        course: The course of the training.
    """

    def __init__(self, model: Layer, plain: training.PlainLoop, course: training.Course) -> None:
        """Trains the model, whose state the caller restores; see :func:`undo_training`."""
        self._model, self._plain, self.course = model, plain, course
        self._whole: dict[int, State] = {}
        self.moments = [
            moment._replace(tensors=digests_of(moment))
            for moment in training.moments(model, plain, course)
        ]

    def tensors(self, number: int, initial: State) -> State:
        """Returns the tensors of a moment from another run of the training."""
        if number not in self._whole:
            with running_from(self._model, initial):
                again = enumerate(training.moments(self._model, self._plain, self.course))
                # Later moments are not asked for yet, and states are for the next step.
                self._whole = {
                    at: moment.clone_tensors().tensors
                    for at, moment in again
                    if at in (number, number + 1)
                }
        return self._whole[number]

    def moved_gradients(self, step: int, start: State) -> State:
        """Returns the gradients of a step whose parameters are off by a unit in the last place."""
        train = partial(self._plain.train, self.course.steps[step])
        gradients = partial(training.gradients_of, self._model)
        return moved_gradients(self._model, start, train, gradients)


def moved_gradients(
    model: Layer, start: State, train: Callable[[], object], gradients: Callable[[], State]
) -> State:
    """Returns the gradients that a training gives when parameters are off by a unit.

    Args:
        model: The model, which gets its state and gradients back.
        start: What it has in place of its own values before.
        train: Runs it forward and backward.
        gradients: Returns the gradients by name.
    """
    with running_from(model, start):
        move_by_a_unit(p for p in model.parameters() if not p.stop_gradient)
        train()
        return {name: gradient.clone() for name, gradient in gradients().items()}


@contextmanager
def running_from(model: Layer, start: State) -> Iterator[None]:
    """While it is open, a model has the state ``start``; then its own state is restored.

    Its gradients are copies then.
    """
    # Copies, for to clear a gradient empties it.
    gradients = [(p, copy_of(p.grad)) for p in model.parameters() if p.grad is not None]
    with undo_training(model), training.pause_counting():
        drop_gradients(model.parameters())
        give(model, start)
        yield
    for parameter, gradient in gradients:
        parameter.grad = gradient


class Comparison:
    """Compares a second training with the first, moment by moment.

    Attributes:
        rounded: By parameter, the rounding difference of its gradient, divided by the largest
            gradient of its layer.
    """

    def __init__(self, model: Layer, expected: Digests, initial: State) -> None:
        """Prepares the comparison, before the second training."""
        self.rounded: dict[str, float] = {}
        self._model, self._expected, self._initial = model, expected, initial
        self._start = initial
        self._number = 0
        #: By parameter, how far the gradient of the step is off.
        self._off: dict[str, float] = {}

    def differences(self, moment: training.Moment) -> list[str]:
        """Compares the next moment; returns the names that differ by more than rounding.

        After a step it sets the model to the values of the first training.
        """
        number, self._number = self._number, self._number + 1
        expected = self._expected.moments[number]
        left, right = digests_of(moment), expected.tensors
        differing = [name for name in {**right, **left} if left.get(name) != right.get(name)]
        if moment.quantity == "gradient":
            self._off = {}
        if differing and moment.quantity in ("gradient", "state"):
            differing = self._beyond(moment, number)
        modes = expected.modes.items()
        wrong = [path for path, mode in modes if moment.modes.get(path) != mode]
        return differing + [f"the mode of {path or 'the model'}" for path in wrong]

    def _beyond(self, moment: training.Moment, number: int) -> list[str]:
        """Returns the names whose differences rounding does not explain."""
        moment = moment.clone_tensors()
        right = self._expected.tensors(number, self._initial)
        names = {**right, **moment.tensors}
        gaps = {name: largest_gap(moment.tensors.get(name), right.get(name)) for name in names}
        off = {name: gap for name, gap in gaps.items() if gap}
        if moment.quantity == "state":
            give(self._model, right)
            self._start = right
            return [name for name, gap in off.items() if gap > self._of_update(name, right[name])]
        self._off = off
        start = self._start
        rounding = Rounding(right, lambda: self._expected.moved_gradients(moment.step, start))
        beyond = [name for name, gap in off.items() if not rounding.carries(name, gap)]
        for name in off.keys() - set(beyond):
            share = off[name] / (rounding.scale(name) or 1.0)
            self.rounded[name] = max(share, self.rounded.get(name, 0.0))
        return beyond

    def _of_update(self, name: str, right: Tensor) -> float:
        """Returns how far a step may move a parameter off, given its gradient's difference."""
        gap = self._off.get(name, 0.0)
        return 2 * (training.RATE * gap + unit_of(right.dtype) * largest_of(right)) if gap else 0.0


def digests_of(moment: training.Moment) -> dict[str, str]:
    """Returns a digest of each tensor of a moment."""
    return {name: digest_of(tensor) for name, tensor in moment.tensors.items()}
