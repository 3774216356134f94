"""Trains one model by a plain loop and by its captured stages, and compares the two trainings.

A training is a few steps of micro-batches, each with an optimizer, then evaluations: a ``Course``.
It yields its outputs, gradients and state as ``Moment``s; start with :func:`run_course`. Of the
first training only digests are kept, with which the second is compared while it runs. If bits
differ, and rounding may be the reason, the first training runs once more for its numbers. A state
is the parameters and buffers of a model by name.
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
from fleetpipe.capture.running.variants import StagedCaptures
from fleetpipe.capture.tracing.capturing import in_mode
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.user_lines import is_capturing
from fleetpipe.capture.tracing.value import NodeFinder, Unopened, arguments_of
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
from fleetpipe.schedules import Placement, Schedule, forward_only
from fleetpipe.schedules.action import GlobalMicroBatch
from fleetpipe.transport import MemoryHub

#: The learning rate: large enough to change the bits of parameters, and not what a layer does.
RATE = 0.05

#: The timeout of an engine in seconds; in one process no message has to be waited for.
_TIMEOUT = 1.0

#: The number of calls of a layer's hooks, by the path of the layer.
Calls = Counter[str]

#: One item for each open :func:`temporary_state`, in which calls of hooks are not counted.
_uncounted_runs: list[None] = []

#: The parameters and buffers of a model by name.
State = Mapping[str, Tensor]


class TrainedStep(NamedTuple):
    """One step of a training.

    Attributes:
        micro_batches: The inputs of each micro-batch.
        schedule: The schedule that the stages run.
        optimizer: The class of the optimizer that takes the step.
        seed: The seed of the random numbers of the step.
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
    """The steps and evaluations that make up a training.

    Attributes:
        steps: The steps, in order.
        evaluations: The inputs on which the model is evaluated afterwards.
    """

    steps: Sequence[TrainedStep]
    evaluations: Sequence[Nest]


class Moment(NamedTuple):
    """The outputs, the gradients or the state of a model at one moment of a training.

    Attributes:
        quantity: What the tensors are: "output", "gradient" or "state" (parameters and buffers).
        step: The number of the step, from 0; for an evaluation the number of steps of the training.
        tensors: The tensors, or their digests, by name. The names of outputs end with the number of
            the micro-batch.
        modes: Whether each layer is in training, by path; empty except with a state.
    """

    quantity: str
    step: int
    tensors: Mapping[str, Any]
    modes: dict[str, bool]

    def clone_tensors(self) -> Moment:
        """Returns a copy whose tensors the training does not change."""
        copies = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return self._replace(tensors=copies)


class PlainTrainer:
    """Trains the untouched model, one micro-batch after another."""

    def __init__(
        self, model: Layer, unopened: Unopened, keys_of: Callable[[TrainedStep], Keys | None]
    ) -> None:
        """Stores the model.

        Args:
            model: The model.
            unopened: Decides which layers are single nodes: each node has a random key of its own.
            keys_of: Returns the random keys of a step; None if the model draws no random numbers.
        """
        self.model, self._unopened, self._keys_of = model, unopened, keys_of

    def train(self, step: TrainedStep) -> list[Nest]:
        """Runs forward and backward of each micro-batch of a step, and returns the outputs.

        Gradients are added to the parameters; the optimizer is not stepped.
        """
        outputs = []
        for number, inputs in enumerate(step.micro_batches):
            keys = self._keys_of(step)
            micro_batch = GlobalMicroBatch(number)
            output = call_keyed(self.model, copy_tensors(inputs), self._unopened, keys, micro_batch)
            weighted(weighted_sum_of(output), step.weights[number]).backward()
            outputs.append(map_tensors(lambda tensor: tensor.detach(), output))
        return outputs

    def evaluate(self, inputs: Nest) -> Nest:
        """Runs the forward of one micro-batch without gradients, and returns its output."""
        args, named = arguments_of(inputs)
        # Without gradients, as the stages run it; so a hook on a gradient is no error.
        with paddle.no_grad(), intercepting(NodeFinder(self.model, self._unopened)):
            return self.model(*args, **named)


class StagesTrainer:
    """Trains the captured stages, all in this process, under the schedule of each step."""

    def __init__(
        self, captures: StagedCaptures, model: Layer, keys_of: Callable[[TrainedStep], Keys | None]
    ) -> None:
        """Stores the captured runs of the forward.

        Args:
            captures: The captured runs of the forward, cut into stages.
            model: The model, whose mode selects the run.
            keys_of: Returns the random keys of a step; None if the model draws no random numbers.
        """
        self._captures, self._keys_of = captures, keys_of
        self._stages = CapturedStages(captures, lambda: model.training)

    def train(self, step: TrainedStep) -> list[Nest]:
        """Runs the schedule of a step, and returns the output of each micro-batch.

        Gradients are added to the parameters; the optimizer is not stepped.
        """
        outputs: list[Nest] = [None] * len(step.micro_batches)

        def loss(output: Nest, number: int) -> Tensor:
            """Stores the output of micro-batch ``number``, and returns its loss."""
            outputs[number] = map_tensors(lambda tensor: tensor.detach(), output)
            return weighted_sum_of(output)

        numbers = list(range(len(step.micro_batches)))
        batches = MicroBatches([copy_tensors(inputs) for inputs in step.micro_batches], numbers)
        with random_keys.under_keys(self._keys_of(step), SoleGroup()):
            self._run(step.schedule, Batch(batches, Losses([loss], step.weights)), training=True)
        return outputs

    def evaluate(self, inputs: Nest) -> Nest:
        """Runs the forward of one micro-batch without gradients, and returns its output."""
        batch = Batch(MicroBatches([inputs], None))
        schedule = forward_only(Placement("loop", self._captures.stages), 1)
        with paddle.no_grad():
            self._run(schedule, batch, training=False)
        return batch.outputs[0]

    def _run(self, schedule: Schedule, batch: Batch, training: bool) -> None:
        """Runs all ranks of a schedule on a batch, in this process."""
        split = SplitBackward(schedule, self._captures.of_example(training=True).layers)
        placement = Placement("loop", self._captures.stages)
        stage = DygraphStage(self._stages.function, placement, split, self._stages)
        plan = schedule.lower(self._stages.edges(training))
        hub = MemoryHub(plan.placement.ranks)
        endpoints = {rank: hub.endpoint(rank) for rank in range(plan.placement.ranks)}
        stage.begin(batch)
        try:
            collectives = dict.fromkeys(("REDUCE", "STEP"), lambda: None)
            Engine(plan, stage, endpoints, _TIMEOUT).run(collectives, GlobalMicroBatch(0))
        finally:
            stage.end()


def run_course(
    model: Layer, trainer: PlainTrainer | StagesTrainer, course: Course
) -> Iterator[Moment]:
    """Trains a model in place, and yields the moments of the training.

    These are the outputs, the gradients and the state of each step, then the outputs and the state
    of each evaluation. The caller may change the model's state between two moments.

    Args:
        model: The model, whose own ``train`` and ``eval`` set the modes.
        trainer: Runs the forward and backward of the model, or of its stages.
        course: The steps and evaluations to run.
    """
    parameters = list(dict.fromkeys(p for p in model.parameters() if not p.stop_gradient))
    for number, step in enumerate(course.steps):
        drop_gradients(model.parameters())
        model.train()
        outputs = trainer.train(step)
        yield Moment("output", number, _name_outputs(outputs, "micro-batch"), {})
        del outputs
        yield Moment("gradient", number, gradients_of(model), {})
        if all(bool(paddle.isfinite(gradient).all()) for gradient in gradients_of(model).values()):
            _update(step, parameters)
        yield Moment("state", number, state_of_model(model), _modes(model))
    drop_gradients(model.parameters())
    model.eval()
    end = len(course.steps)
    for number, inputs in enumerate(course.evaluations):
        output = trainer.evaluate(copy_tensors(inputs))
        yield Moment("output", end, _name_outputs([output], "evaluation", number), {})
        yield Moment("state", end, state_of_model(model), _modes(model))


def _update(step: TrainedStep, parameters: Sequence[Tensor]) -> None:
    """Updates each parameter by a separate optimizer, and clears the parameter's gradient.

    Thus memory holds the optimizer state of only one parameter at a time.
    """
    # Paddle counts the names of optimizers' states: the user's optimizers keep their numbers.
    with paddle.utils.unique_name.guard():
        for parameter in parameters:
            if parameter.grad is not None:
                step.optimizer(RATE, parameters=[parameter]).step()
                drop_gradients([parameter])


def gradients_of(model: Layer) -> dict[str, Tensor]:
    """Returns the gradient of each parameter that has one, by the parameter's name."""
    return {n: dense(p.grad, p) for n, p in model.named_parameters() if p.grad is not None}


def state_of_model(model: Layer) -> dict[str, Tensor]:
    """Returns all parameters and buffers of a model by name, unsaved buffers included."""
    buffers = {
        f"{path}.{name}" if path else name: holder[name]
        for path, layer in model.named_sublayers(include_self=True)
        for holder, name in state_slots(layer)
        if has_memory(holder[name])
    }
    return {**dict(model.named_parameters()), **buffers}


def weighted_sum_of(output: Nest) -> Tensor:
    """Returns a weighted sum of all numbers that a model returns, each with another weight.

    Backward may start from it even if no output depends on a trained parameter.
    """
    total = paddle.zeros([])
    total.stop_gradient = False
    for tensor in differentiable(output, roots=True):
        real = paddle.as_real(tensor) if tensor.is_complex() else tensor
        if real.size:
            total = total + (real.astype("float32") * _fixed_weights(tuple(real.shape))).mean()
    return total


@functools.cache
def _fixed_weights(shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor of a shape with fixed numbers between 0.5 and 1.5."""
    # A short list is repeated, since many random numbers take long.
    numbers = np.random.default_rng(0).uniform(0.5, 1.5, 997).astype("float32")
    return paddle.to_tensor(np.resize(numbers, shape))


def _name_outputs(outputs: Sequence[Nest], unit: str, first: int = 0) -> dict[str, Tensor]:
    """Returns the tensors of several outputs by names such as "0 of micro-batch 2".

    ``unit`` is "micro-batch" or "evaluation", and ``first`` the number of the first output.
    """
    return {
        f"{index} of {unit} {number}": tensor
        for number, output in enumerate(outputs, first)
        for index, tensor in enumerate(tensors_of(output))
    }


def _modes(model: Layer) -> dict[str, bool]:
    """Returns whether each layer of a model is in training, by the layer's path."""
    return {path: layer.training for path, layer in model.named_sublayers(include_self=True)}


@contextmanager
def count_hook_calls(model: Layer) -> Iterator[Calls]:
    """Counts calls of the forward hooks of all sublayers while this context is open.

    Hooks of the model itself are left out, since their operations are captured.

    Yields:
        The numbers of calls so far, by the path of the layer.
    """
    calls: Calls = Counter()
    originals: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for path, layer in model.named_sublayers():
        for hooks in forward_hooks(layer):
            originals.append((hooks, dict(hooks)))
            for key, hook in hooks.items():
                hooks[key] = functools.partial(_count_call, calls, path, hook)
    try:
        yield calls
    finally:
        for hooks, original in originals:
            hooks.update((key, hook) for key, hook in original.items() if key in hooks)


def _count_call(calls: Calls, path: str, hook: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls a hook of the layer at ``path``, and adds the call to ``calls``.

    Calls in a capture, in a recompute and within :func:`temporary_state` are not counted.
    """
    calls[path] += not (is_capturing() or _uncounted_runs or rerunning())
    return hook(*args, **named)


@contextmanager
def undo_training(model: Layer) -> Iterator[None]:
    """Restores a model's state and modes when the context ends, and clears its gradients."""
    with state_kept(model), in_mode(model, model.training):
        try:
            yield
        finally:
            drop_gradients(model.parameters())


def copy_state_into(model: Layer, state: State) -> None:
    """Copies the tensors of a state into a model's parameters and buffers of these names."""
    with paddle.no_grad():
        for name, tensor in state_of_model(model).items():
            if name in state and not same_bits(tensor, state[name]):
                # A buffer may have got another length.
                set_data(tensor, state[name].detach().clone())


class Digests:
    """Digests of the tensors in a training of the plain model, which is not cut into stages.

    Attributes:
        moments: Each step's outputs, gradients and state, and each evaluation's outputs and state;
            with digests in the place of tensors.
        course: The steps and evaluations of the training.
    """

    def __init__(self, model: Layer, plain: PlainTrainer, course: Course) -> None:
        """Trains the model, and stores the digests.

        The caller restores the model's state by :func:`undo_training`.
        """
        self._model, self._plain, self.course = model, plain, course
        self._states: dict[int, State] = {}
        self.moments = [
            moment._replace(tensors=digests_of(moment))
            for moment in run_course(model, plain, course)
        ]

    def tensors_at(self, number: int, initial: State) -> State:
        """Returns the tensors of a moment, for which the training runs again.

        Args:
            number: The index of the moment in :attr:`moments`.
            initial: The model's state before the training.
        """
        if number not in self._states:
            with temporary_state(self._model, initial):
                moments = enumerate(run_course(self._model, self._plain, self.course))
                # The next moment is kept too: after gradients the state is asked for.
                self._states = {
                    index: moment.clone_tensors().tensors
                    for index, moment in moments
                    if index in (number, number + 1)
                }
        return self._states[number]

    def moved_gradients(self, step: int, start: State) -> State:
        """Returns the gradients of a step that starts from slightly other parameters.

        Each parameter's number differs from ``start`` by a unit in the last place.
        """
        train = functools.partial(self._plain.train, self.course.steps[step])
        gradients = functools.partial(gradients_of, self._model)
        return moved_gradients(self._model, start, train, gradients)


def moved_gradients(
    model: Layer, start: State, train: Callable[[], object], gradients: Callable[[], State]
) -> State:
    """Returns gradients from parameters of which each number is changed in its last place.

    Their differences show how large the effect of rounding on the gradients is.

    Args:
        model: The model; its state and gradients are restored afterwards.
        start: The state whose parameters are changed.
        train: Runs the model forward and backward.
        gradients: Returns the gradients after that, by name.
    """
    with temporary_state(model, start):
        move_by_a_unit(p for p in model.parameters() if not p.stop_gradient)
        train()
        return {name: gradient.clone() for name, gradient in gradients().items()}


@contextmanager
def temporary_state(model: Layer, start: State) -> Iterator[None]:
    """Gives a model the state ``start`` while this context is open, then restores its own state.

    Gradients are cleared in the context, and restored as copies. Calls of hooks do not count.
    """
    # Copies, since clearing a gradient empties its tensor.
    gradients = [(p, copy_of(p.grad)) for p in model.parameters() if p.grad is not None]
    _uncounted_runs.append(None)
    try:
        with undo_training(model):
            drop_gradients(model.parameters())
            copy_state_into(model, start)
            yield
    finally:
        _uncounted_runs.pop()
    for parameter, gradient in gradients:
        parameter.grad = gradient


class Comparison:
    """Compares the training of the stages with the plain model's before it, moment by moment.

    Attributes:
        rounded: By parameter, the largest rounding difference of its gradient, divided by the
            largest gradient of its layer.
    """

    def __init__(self, model: Layer, expected: Digests, initial: State) -> None:
        """Prepares the comparison, before the second training.

        Args:
            model: The model that the second training changes.
            expected: The digests of the first training.
            initial: The model's state before both trainings.
        """
        self.rounded: dict[str, float] = {}
        self._model, self._expected, self._initial = model, expected, initial
        #: The state with which the current step has begun.
        self._start = initial
        #: The index of the next moment.
        self._number = 0
        #: By parameter, the largest difference of its gradient in the current step.
        self._gradient_gaps: dict[str, float] = {}

    def differences(self, moment: Moment) -> list[str]:
        """Compares the next moment with the same moment of the first training.

        If the state after a step differs, the model gets the state of the first training.

        Returns:
            The names of tensors that differ by more than rounding, and texts for the layers whose
            modes differ.
        """
        number, self._number = self._number, self._number + 1
        expected = self._expected.moments[number]
        got, expected_digests = digests_of(moment), expected.tensors
        names = {**expected_digests, **got}
        differing = [name for name in names if got.get(name) != expected_digests.get(name)]
        if moment.quantity == "gradient":
            self._gradient_gaps = {}
        if differing and moment.quantity != "output":
            differing = self._differences_beyond_rounding(moment, number)
        modes = expected.modes.items()
        wrong = [path for path, mode in modes if moment.modes.get(path) != mode]
        return differing + [f"the mode of {path or 'the model'}" for path in wrong]

    def _differences_beyond_rounding(self, moment: Moment, number: int) -> list[str]:
        """Returns the names of gradients or states whose differences rounding does not explain.

        ``number`` is the index of the moment in both trainings.
        """
        moment = moment.clone_tensors()
        expected = self._expected.tensors_at(number, self._initial)
        names = {**expected, **moment.tensors}
        gaps = {name: largest_gap(moment.tensors.get(name), expected.get(name)) for name in names}
        gaps = {name: gap for name, gap in gaps.items() if gap}
        if moment.quantity == "state":
            copy_state_into(self._model, expected)
            self._start = expected
            # A parameter may differ by rounding after a step in which its gradient did.
            limits = {
                name: 2 * (RATE * gap + unit_of(expected[name].dtype) * largest_of(expected[name]))
                for name, gap in self._gradient_gaps.items()
                if name in expected
            }
            return [name for name, gap in gaps.items() if gap > limits.get(name, 0.0)]
        self._gradient_gaps = gaps
        start = self._start
        rounding = Rounding(expected, lambda: self._expected.moved_gradients(moment.step, start))
        beyond = [name for name, gap in gaps.items() if not rounding.explains(name, gap)]
        for name in gaps.keys() - set(beyond):
            share = gaps[name] / (rounding.scale(name) or 1.0)
            self.rounded[name] = max(share, self.rounded.get(name, 0.0))
        return beyond


def digests_of(moment: Moment) -> dict[str, str]:
    """Returns a digest of each tensor of a moment."""
    return {name: digest_of(tensor) for name, tensor in moment.tensors.items()}
