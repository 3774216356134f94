"""Trains one model by a plain loop and by its captured stages, and compares the two trainings.

A training is a few steps of micro-batches, each with an optimizer, then evaluations. It yields its
outputs, gradients and state as ``Moment``s (start with :func:`moments`). Of the first training only
digests are kept, with which the second is compared while it runs. If bits differ, and rounding may
be the reason, the first training runs once more for its numbers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Nest, Optimizer, Tensor
from fleetpipe.capture.running.stages import CapturedStages, call_keyed
from fleetpipe.capture.running.variants import Forms
from fleetpipe.capture.tracing.capturing import in_mode
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.user_lines import is_noting
from fleetpipe.capture.tracing.value import Unopened, Walk, arguments_of
from fleetpipe.compare.differences import (
    Rounding,
    digest_of,
    largest_gap,
    largest_of,
    move_by_a_unit,
    same_bits,
    unit_of,
)
from fleetpipe.dygraph import random_keys, weighted
from fleetpipe.dygraph.backward.recompute import rerunning
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.stage_interfaces import Batch
from fleetpipe.dygraph.gradients import dense, drop_gradients
from fleetpipe.dygraph.nest import copy_tensors, differentiable, map_tensors, tensors_of
from fleetpipe.dygraph.random_keys import Keys
from fleetpipe.engine.engine import Engine
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import intercepting, set_data
from fleetpipe.paddle_api.layer import forward_hooks, state_slots
from fleetpipe.paddle_api.tensor import copy_of, has_memory
from fleetpipe.schedules import Placement, Plan, Schedule, forward_only
from fleetpipe.schedules.action import GlobalMicroBatch
from fleetpipe.transport import MemoryHub

#: The learning rate: large enough to change the bits of parameters, and not what a layer does.
RATE = 0.05

#: Seconds that an engine waits for a message; in one process none has to be waited for.
_NO_WAIT = 1.0

_FIRST = GlobalMicroBatch(0)

#: By the path of a layer, how often its hooks were called.
Calls = Counter[str]

#: One item for each open :func:`running_from`, in which calls of hooks are not counted.
_pauses: list[None] = []

#: The parameters and buffers of a model by name.
State = Mapping[str, Tensor]


class TrainedStep(NamedTuple):
    """One step of a training.

    Attributes:
        micro_batches: The inputs of each micro-batch.
        schedule: The schedule that the stages run.
        optimizer: The class of the optimizer that takes the step.
        seed: The seed of its random numbers.
    """

    micro_batches: Sequence[Nest]
    schedule: Schedule
    optimizer: type[Optimizer]
    seed: int

    @property
    def weights(self) -> list[Fraction]:
        """The weight of each micro-batch in the loss."""
        return [Fraction(1, len(self.micro_batches))] * len(self.micro_batches)


class Course(NamedTuple):
    """The steps and evaluations of a training.

    Attributes:
        steps: The steps, in order.
        evaluations: The inputs on which the model is evaluated afterwards.
    """

    steps: Sequence[TrainedStep]
    evaluations: Sequence[Nest]


class Moment(NamedTuple):
    """The tensors of a training at one moment.

    Attributes:
        quantity: "output", "gradient" or "state" (parameters and buffers).
        step: The number of the step; for an evaluation the number of all steps.
        tensors: The tensors, or their digests, by name. The names of outputs end with the number of
            the micro-batch.
        modes: By path, whether a layer is in training.
    """

    quantity: str
    step: int
    tensors: Mapping[str, Any]
    modes: dict[str, bool]

    def clone_tensors(self) -> Moment:
        """Returns a copy whose tensors the training does not change."""
        copies = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return self._replace(tensors=copies)


class PlainLoop:
    """Trains the untouched model, one micro-batch after another."""

    def __init__(
        self, model: Layer, unopened: Unopened, keys_of: Callable[[TrainedStep], Keys | None]
    ) -> None:
        """Stores the model.

        Args:
            model: The model.
            unopened: The layers that are single nodes: each node has a random key of its own.
            keys_of: Returns the random keys of a step; None if the model draws no random numbers.
        """
        self.model, self._unopened, self._keys_of = model, unopened, keys_of

    def train(self, step: TrainedStep) -> list[Nest]:
        """Runs forward and backward of each micro-batch; see :func:`moments`."""
        outputs = []
        for number, inputs in enumerate(step.micro_batches):
            keys = self._keys_of(step)
            micro_batch = GlobalMicroBatch(number)
            output = call_keyed(self.model, copy_tensors(inputs), self._unopened, keys, micro_batch)
            weighted(loss_of(output), step.weights[number]).backward()
            outputs.append(map_tensors(lambda tensor: tensor.detach(), output))
        return outputs

    def evaluate(self, inputs: Nest) -> Nest:
        """Runs one forward; see :func:`moments`."""
        args, named = arguments_of(inputs)
        # Without gradients, as the stages run it; so a hook on a gradient is no error.
        with paddle.no_grad(), intercepting(Walk(self.model, self._unopened)):
            return self.model(*args, **named)


class CapturedRun:
    """Trains the captured stages, all in this process, under the schedule of each step."""

    def __init__(
        self, forms: Forms, model: Layer, keys_of: Callable[[TrainedStep], Keys | None]
    ) -> None:
        """Stores the captured runs of the forward.

        Args:
            forms: The captured runs.
            model: The model, whose mode selects the run.
            keys_of: Returns the random keys of a step; None if the model draws no random numbers.
        """
        self._forms, self._keys_of = forms, keys_of
        self._parts = CapturedStages(forms, lambda: model.training)

    def train(self, step: TrainedStep) -> list[Nest]:
        """Runs the plan of the step; see :func:`moments`."""
        outputs: list[Nest] = [None] * len(step.micro_batches)

        def loss(output: Nest, number: int) -> Tensor:
            outputs[number] = map_tensors(lambda tensor: tensor.detach(), output)
            return loss_of(output)

        plan = step.schedule.lower(self._parts.edges(training=True))
        stage = self._stage(step.schedule)
        numbers = list(range(len(step.micro_batches)))
        batches = MicroBatches([copy_tensors(inputs) for inputs in step.micro_batches], numbers)
        stage.begin(Batch(batches, Losses([loss], step.weights)))
        try:
            with random_keys.under_keys(self._keys_of(step), SoleGroup()):
                collectives = dict.fromkeys(("REDUCE", "STEP"), lambda: None)
                _engine(plan, stage).run(collectives, _FIRST)
        finally:
            stage.end()
        return outputs

    def evaluate(self, inputs: Nest) -> Nest:
        """Runs one micro-batch forward; see :func:`moments`."""
        schedule = forward_only(Placement("loop", self._forms.stages), 1)
        stage = self._stage(schedule)
        batch = Batch(MicroBatches([inputs], None))
        stage.begin(batch)
        try:
            with paddle.no_grad():
                _engine(schedule.lower(self._parts.edges(training=False)), stage).run({}, _FIRST)
        finally:
            stage.end()
        return batch.outputs[0]

    def _stage(self, schedule: Schedule) -> DygraphStage:
        form = self._forms.example(training=True)
        split = SplitBackward(schedule, form.layers)
        placement = Placement("loop", self._forms.stages)
        return DygraphStage(self._parts.function, placement, split, self._parts)


def _engine(plan: Plan, stage: DygraphStage) -> Engine:
    """Returns an engine that runs the actions of all ranks in this process."""
    hub = MemoryHub(plan.placement.ranks)
    endpoints = {rank: hub.endpoint(rank) for rank in range(plan.placement.ranks)}
    return Engine(plan, stage, endpoints, _NO_WAIT)


def moments(model: Layer, side: PlainLoop | CapturedRun, course: Course) -> Iterator[Moment]:
    """Trains a model in place, and yields the moments of the training.

    The caller may change the model's values between two moments.

    Args:
        model: The model, whose own ``train`` and ``eval`` set the modes.
        side: Runs the model: its ``train`` adds the gradients of all micro-batches of a step to the
            parameters and returns the outputs, its ``evaluate`` those of one micro-batch.
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
        output = side.evaluate(copy_tensors(inputs))
        yield Moment("output", end, _number_outputs([output], "evaluation", number), {})
        yield Moment("state", end, state_of_model(model), _modes(model))


def _update(step: TrainedStep, parameters: Sequence[Tensor]) -> None:
    """Steps each parameter with its own optimizer, so that memory holds the state of only one."""
    # Paddle counts the names of optimizers' states: the user's optimizers keep their numbers.
    with paddle.utils.unique_name.guard():
        for parameter in parameters:
            if parameter.grad is not None:
                step.optimizer(RATE, parameters=[parameter]).step()
                drop_gradients([parameter])


def gradients_of(model: Layer) -> dict[str, Tensor]:
    """Returns the gradients of a model's parameters by name, for those that have one."""
    return {n: dense(p.grad, p) for n, p in model.named_parameters() if p.grad is not None}


def state_of_model(model: Layer) -> dict[str, Tensor]:
    """Returns all parameters and buffers of a model by name, also those that no state dict has."""
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


@functools.cache
def _weights(shape: tuple[int, ...]) -> Tensor:
    """Returns fixed weights between 0.5 and 1.5 in a shape."""
    # A short list is repeated, since many random numbers take long.
    numbers = np.random.default_rng(0).uniform(0.5, 1.5, 997).astype("float32")
    return paddle.to_tensor(np.resize(numbers, shape))


def _number_outputs(outputs: Sequence[Nest], what: str, first: int = 0) -> dict[str, Tensor]:
    """Returns the tensors of outputs by names as "0 of micro-batch 2"."""
    return {
        f"{index} of {what} {number}": tensor
        for number, output in enumerate(outputs, first)
        for index, tensor in enumerate(tensors_of(output))
    }


def _modes(model: Layer) -> dict[str, bool]:
    return {path: layer.training for path, layer in model.named_sublayers(include_self=True)}


@contextmanager
def count_hook_calls(model: Layer) -> Iterator[Calls]:
    """Counts calls of the forward hooks of all sublayers while the context is open.

    Hooks of the model itself are left out, since their operations are captured.
    """
    calls: Calls = Counter()
    replaced: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for path, layer in model.named_sublayers():
        for hooks in forward_hooks(layer):
            replaced.append((hooks, dict(hooks)))
            for key, hook in hooks.items():
                hooks[key] = functools.partial(_count_call, calls, path, hook)
    try:
        yield calls
    finally:
        for hooks, before in replaced:
            hooks.update((key, hook) for key, hook in before.items() if key in hooks)


def _count_call(calls: Calls, path: str, hook: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls a hook, and counts the call unless it belongs to a capture or a repeated run."""
    calls[path] += not (is_noting() or _pauses or rerunning())
    return hook(*args, **named)


@contextmanager
def undo_training(model: Layer) -> Iterator[None]:
    """Restores a model's state when the context ends, and clears its gradients."""
    with state_kept(model), in_mode(model, model.training):
        try:
            yield
        finally:
            drop_gradients(model.parameters())


def give(model: Layer, state: State) -> None:
    """Copies the tensors of a state into a model's parameters and buffers."""
    with paddle.no_grad():
        for name, tensor in state_of_model(model).items():
            if name in state and not same_bits(tensor, state[name]):
                # A buffer may have got another length.
                set_data(tensor, state[name].detach().clone())


class Digests:
    """The digests of all moments of a plain training.

    Attributes:
        moments: All moments, with digests in the place of tensors.
        course: The course of the training.
    """

    def __init__(self, model: Layer, plain: PlainLoop, course: Course) -> None:
        """Trains the model; the caller restores its state, see :func:`undo_training`."""
        self._model, self._plain, self.course = model, plain, course
        self._states: dict[int, State] = {}
        self.moments = [
            moment._replace(tensors=digests_of(moment)) for moment in moments(model, plain, course)
        ]

    def tensors(self, number: int, initial: State) -> State:
        """Returns the tensors of moment ``number``, from another run of the training."""
        if number not in self._states:
            with running_from(self._model, initial):
                again = enumerate(moments(self._model, self._plain, self.course))
                # The next moment is kept too: after gradients the state is asked for.
                self._states = {
                    at: moment.clone_tensors().tensors
                    for at, moment in again
                    if at in (number, number + 1)
                }
        return self._states[number]

    def moved_gradients(self, step: int, start: State) -> State:
        """Returns the gradients of a step from parameters moved by a unit in the last place."""
        train = functools.partial(self._plain.train, self.course.steps[step])
        gradients = functools.partial(gradients_of, self._model)
        return moved_gradients(self._model, start, train, gradients)


def moved_gradients(
    model: Layer, start: State, train: Callable[[], object], gradients: Callable[[], State]
) -> State:
    """Returns the gradients of a training from parameters moved by a unit in the last place.

    Args:
        model: The model; its state and gradients are restored afterwards.
        start: The state from which it trains.
        train: Runs the model forward and backward.
        gradients: Returns the gradients by name.
    """
    with running_from(model, start):
        move_by_a_unit(p for p in model.parameters() if not p.stop_gradient)
        train()
        return {name: gradient.clone() for name, gradient in gradients().items()}


@contextmanager
def running_from(model: Layer, start: State) -> Iterator[None]:
    """While it is open, a model has the state ``start``; then its own state is restored.

    The restored gradients are copies. Calls of hooks are not counted meanwhile.
    """
    # Copies, since clearing a gradient empties its tensor.
    gradients = [(p, copy_of(p.grad)) for p in model.parameters() if p.grad is not None]
    _pauses.append(None)
    try:
        with undo_training(model):
            drop_gradients(model.parameters())
            give(model, start)
            yield
    finally:
        _pauses.pop()
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

    def differences(self, moment: Moment) -> list[str]:
        """Compares the next moment, and returns the names that differ by more than rounding.

        If the state after a step differs, the model gets the state of the first training.
        """
        number, self._number = self._number, self._number + 1
        expected = self._expected.moments[number]
        got, wanted = digests_of(moment), expected.tensors
        differing = [name for name in {**wanted, **got} if got.get(name) != wanted.get(name)]
        if moment.quantity == "gradient":
            self._off = {}
        if differing and moment.quantity in ("gradient", "state"):
            differing = self._beyond(moment, number)
        modes = expected.modes.items()
        wrong = [path for path, mode in modes if moment.modes.get(path) != mode]
        return differing + [f"the mode of {path or 'the model'}" for path in wrong]

    def _beyond(self, moment: Moment, number: int) -> list[str]:
        """Returns the names whose differences rounding does not explain."""
        moment = moment.clone_tensors()
        right = self._expected.tensors(number, self._initial)
        names = {**right, **moment.tensors}
        gaps = {name: largest_gap(moment.tensors.get(name), right.get(name)) for name in names}
        off = {name: gap for name, gap in gaps.items() if gap}
        if moment.quantity == "state":
            give(self._model, right)
            self._start = right
            return [name for name, gap in off.items() if gap > self._limit(name, right[name])]
        self._off = off
        start = self._start
        rounding = Rounding(right, lambda: self._expected.moved_gradients(moment.step, start))
        beyond = [name for name, gap in off.items() if not rounding.carries(name, gap)]
        for name in off.keys() - set(beyond):
            share = off[name] / (rounding.scale(name) or 1.0)
            self.rounded[name] = max(share, self.rounded.get(name, 0.0))
        return beyond

    def _limit(self, name: str, right: Tensor) -> float:
        """Returns the largest rounding difference of a parameter after a step."""
        gap = self._off.get(name, 0.0)
        return 2 * (RATE * gap + unit_of(right.dtype) * largest_of(right)) if gap else 0.0


def digests_of(moment: Moment) -> dict[str, str]:
    """Returns a digest of each tensor of a moment."""
    return {name: digest_of(tensor) for name, tensor in moment.tensors.items()}
