"""Trains an untouched model and its captured stages alike, and names the first layer that differs.

Start with :func:`prove`. The plain loop runs first, on the user's own model, and leaves digests.
Then the state is restored, and the stages train the same course under their schedule.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fleetpipe import schedules
from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.cutting.auto import state_of
from fleetpipe.capture.proof.training import (
    Calls,
    CapturedRun,
    Comparison,
    Course,
    Digests,
    Moment,
    PlainLoop,
    TrainedStep,
    count_hook_calls,
    moments,
    state_of_model,
    undo_training,
)
from fleetpipe.capture.repeatability import ALL, vary_example, with_another_row
from fleetpipe.capture.running.replay import name_of
from fleetpipe.capture.running.stages import Keyed
from fleetpipe.capture.running.variants import Form, Forms
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.user_lines import forward_place, raised_at
from fleetpipe.capture.tracing.value import Node, NodeCall, Unopened, Walk, arguments_of
from fleetpipe.compare.differences import same_bits
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.model.arrangement import Arrangement
from fleetpipe.dygraph.nest import copy_tensors, tensors_of
from fleetpipe.errors import CaptureError, ConfigError, reason
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.distributed import user_strategy
from fleetpipe.paddle_api.eager_operations import Function, intercepting
from fleetpipe.paddle_api.random import generator_states
from fleetpipe.paddle_api.tensor import has_memory
from fleetpipe.profiling import PipelinePlan
from fleetpipe.schedules import Schedule

OUTSIDE_OF_PADDLE = (
    "the forward does something that is no operation of Paddle's on tensors: it keeps something "
    "from call to call, or computes outside of Paddle"
)
_INTO_A_SUBLAYER = (
    "put that code into a sublayer, or its layer's class into no_split; where it is in one, "
    "keep what it counts in a buffer, written by set_value or paddle.assign"
)

#: The most micro-batches of a step, if a batch has more: enough for every phase of a schedule.
MOST = 8

#: A forward on other inputs may run this multiple of the example's operations, and this many more;
#: with more it is taken for an endless loop.
_TIMES, _MORE = 10, 1000

#: The number of micro-batches of a step, if there is no strategy.
_MICRO_BATCHES = 3

#: The schedules that train, if there is no strategy.
_SCHEDULES = ("1F1B", "ZBH1")


def refutation(
    capturing: Capturing,
    forms: Forms,
    moment: Moment,
    differing: Sequence[str],
    course: Course,
    keys_of: Callable[[TrainedStep], random_keys.Keys | None],
) -> CaptureError:
    """Returns the error for a moment of the stages' training that differs.

    Args:
        capturing: The model, in the state of that moment.
        forms: Its captured runs.
        moment: The moment of the stages' training.
        differing: The names of the tensors that differ.
        course: The course of the training.
        keys_of: Returns the random keys of a step; None if the model draws no random numbers.
    """
    training = moment.step < len(course.steps)
    form = forms.example(training)
    node: Node | None = None
    if moment.quantity == "output":
        number = int(differing[0].rpartition(" ")[2])
        micro_batches = course.steps[moment.step].micro_batches if training else course.evaluations
        inputs = micro_batches[number]
        form = forms.of(capturing.look_of(inputs), training)
        keys = keys_of(course.steps[moment.step]) if training else None
        node = first_difference(capturing, form, copy_tensors(inputs), keys)
    names = [re.sub("^the mode of ", "", name) for name in differing]
    # Backward reaches the last node first; written state is wrong from the first node on.
    backwards = moment.quantity == "gradient"
    node = node or node_of(form, capturing.model, names, backwards)
    where = f"{node.name}, {node.place}" if node else forward_place(capturing.model)
    writes = (
        f"; the forward writes into {name}, which {one.name} uses, {one.place}"
        for one in form.trace.nodes
        for name in one.state & form.trace.changed.keys()
    )
    schedule = course.steps[moment.step].schedule.name if training else "evaluation"
    kind = {"output": "output ", "gradient": "gradient of "}.get(moment.quantity, "")
    return CaptureError(
        "the captured stages do not do what the model does: "
        f"{kind}{differing[0]} differs in step {moment.step}, {schedule}",
        where=f"first in {where}{next(writes, '')}",
        expected="the bits of the untouched model, trained by a plain loop",
        cause=OUTSIDE_OF_PADDLE,
        fix=_INTO_A_SUBLAYER,
    )


def unequal_hooks(model: Layer, calls: Calls, expected: Calls) -> CaptureError:
    """Returns the error for hooks that the stages call more or less often than the model does."""
    path = next(path for path in [*expected, *calls] if calls[path] != expected[path])
    return CaptureError(
        f"the captured stages call the hooks of {path} "
        f"{calls[path]} times, and the model calls them {expected[path]} times",
        where=forward_place(dict(model.named_sublayers())[path]),
        cause="the layer is called in another way than by its name in the model",
        fix="put the hook on a sublayer, or the layer's class into no_split",
    )


def node_of(form: Form, model: Layer, names: Sequence[str], backwards: bool) -> Node | None:
    """Returns the first node that uses one of these parameters or buffers, or is such a layer.

    With ``backwards`` it returns the last one.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {id(state[name]) for name in names if name in state}
    nodes = reversed(form.trace.nodes) if backwards else iter(form.trace.nodes)
    for node in nodes:
        if not tensors.isdisjoint(map(id, state_of(node))):
            return node
        if node.is_layer and node.scopes[-1].path in names:
            return node
    return None


class _Recorded(Keyed):
    """Records the outputs of each node of the untouched model."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.outputs: list[list[Tensor]] = []

    def node(self, call: NodeCall) -> Any:
        """Calls a node under its key, if there are keys."""
        output = super().node(call)
        made = list(tensors_of(output))
        self.outputs.append([t.clone() if has_memory(t) else t for t in made])
        return output


def first_difference(
    capturing: Capturing, form: Form, inputs: Nest, keys: random_keys.Keys | None
) -> Node | None:
    """Returns the first node whose captured call returns other values than the model's.

    Both run forward in the current mode of the model.

    Args:
        capturing: The model.
        form: Its captured run.
        inputs: One micro-batch.
        keys: The random keys of both; None if the model draws no random numbers.
    """
    model, (args, named) = capturing.model, arguments_of(copy_tensors(inputs))
    recorded = _Recorded(model, capturing.unopened, keys)
    with paddle.no_grad(), random_keys.under_keys(keys, SoleGroup()):
        with state_kept(model), intercepting(recorded):
            model(*args, **named)
        with state_kept(model):
            return _first(form, inputs, keys, recorded.outputs)


def _first(
    form: Form, inputs: Nest, keys: random_keys.Keys | None, expected_outputs: list[list[Tensor]]
) -> Node | None:
    """Runs the captured calls, and returns the first node whose outputs differ."""
    values: Nest = form.functions[0](inputs)
    calls = zip(form.functions[1:-1], form.trace.nodes, expected_outputs)
    for number, (function, node, expected) in enumerate(calls):
        if keys is not None:
            keys.enter(number + 1)
        values = function(values)
        outputs = [values.get(name_of(value)) for value in node.outputs]
        if any(
            one is not None and has_memory(one) and not same_bits(one, other)
            for one, other in zip(outputs, expected)
        ):
            return node
    return None


class Proof(NamedTuple):
    """What was compared; all bits are equal, except those of the gradients in ``rounded``.

    Attributes:
        outputs: The number of tensors that the model returns, over all micro-batches.
        gradients: The number of parameters with a gradient.
        buffers: The number of buffers, running statistics among them.
        rounded: By parameter, the largest rounding difference of its gradient, divided by the
            largest gradient of its layer.
        summed: The values and parameters whose gradients are added up stage by stage.
        keyed: Whether the model drew random numbers, under keys.
        trained: For each step the schedule's name and the number of micro-batches.
        evaluated: The number of rows of each evaluation.
    """

    outputs: int
    gradients: int
    buffers: int
    rounded: dict[str, float]
    summed: tuple[str, ...]
    keyed: bool
    trained: tuple[tuple[str, int], ...]
    evaluated: tuple[int, ...]

    def __str__(self) -> str:
        text = (
            f"equal in bits: {self.outputs} outputs, {self.gradients - len(self.rounded)} "
            f"gradients, {self.buffers} buffers"
        )
        if self.rounded:
            largest = max(self.rounded.values())
            text += (
                f"; {len(self.rounded)} gradients to rounding (at most {largest:.1e}), where "
                f"that of {', '.join(self.summed) or 'a value'} is added up stage by stage"
            )
        names = " and ".join(dict.fromkeys(name for name, _ in self.trained))
        steps, (_, count) = len(self.trained), self.trained[0]
        rows = " and ".join(map(str, self.evaluated))
        text += f"; trained {steps} steps of {count} micro-batches under {names}"
        text += f", evaluated {rows} rows" * bool(rows)
        return text + (", under the same random keys" if self.keyed else "")


def prove(capturing: Capturing, forms: Forms, schedule: Schedule | None = None) -> Proof:
    """Trains a model and its captured stages, compares them, and restores the model.

    Gradients are cleared.

    Args:
        capturing: The model, with an example of its inputs.
        forms: Its captured runs.
        schedule: The schedule that will train the model; None takes two, one with a full and one
            with a split backward.

    Raises:
        CaptureError: They differ; the error names the first layer that does, with file and line.
    """
    model = capturing.model
    draws_in_python = forms.example(training=True).trace.draws
    keyed = draws_in_python or _draws(model, capturing.example)

    def keys_of(step: TrainedStep) -> random_keys.Keys | None:
        return random_keys.Keys(step.seed, draws_in_python) if keyed else None

    count = max(_MICRO_BATCHES, forms.stages)
    planned = (
        [schedule]
        if schedule
        else [schedules.build(name, ranks=forms.stages, micro_batches=count) for name in _SCHEDULES]
    )
    plain = PlainLoop(model, capturing.unopened, keys_of)
    expected, expected_calls = _train_plain(plain, _courses(capturing, planned))
    course = expected.course
    # These share memory with the model's tensors; ``undo_training`` restores it in place.
    initial = {name: tensor.detach() for name, tensor in state_of_model(model).items()}
    with undo_training(model), count_hook_calls(model) as calls:
        comparison = Comparison(model, expected, initial)
        for moment in moments(model, CapturedRun(forms, model, keys_of), course):
            differing = comparison.differences(moment)
            if differing:
                raise refutation(capturing, forms, moment, differing, course, keys_of)
    if calls != expected_calls:
        raise unequal_hooks(model, calls, expected_calls)
    return _proof(expected, course, comparison.rounded, forms, keyed)


def _courses(capturing: Capturing, planned: Sequence[Schedule]) -> Iterator[Course]:
    """Yields courses: on varied numbers and rows, then simpler ones in case the model fails."""
    trial = Trial(capturing.model)
    example = capturing.example
    inputs = [numbers for one in ALL if trial.accepts(numbers := vary_example(capturing, one))]
    rows = [example, with_another_row(capturing)]
    evaluations = [x for x in rows if x is not None and trial.accepts(x, training=False)]
    steps = _steps(inputs or [example], planned)
    yield Course(steps, evaluations)
    # After a step a model may fail in an evaluation that it passed before.
    yield Course(steps, [])
    yield Course(_steps([example], planned), [])


def _train_plain(plain: PlainLoop, courses: Iterator[Course]) -> tuple[Digests, Calls]:
    """Trains the plain model by the first course that does not fail.

    Returns:
        The digests, and the number of calls of the hooks of each layer.
    """
    failure = Exception()
    for course in courses:
        try:
            with undo_training(plain.model), count_hook_calls(plain.model) as calls:
                return Digests(plain.model, plain, course), calls
        except Exception as error:
            failure = error
    raise CaptureError(
        f"the plain {type(plain.model).__name__} fails in training: {reason(failure)}",
        where=raised_at(failure.__traceback__),
        cause="it was trained on example_inputs by a plain loop, to compare the pipeline with it",
        fix="train the plain model on such inputs first",
    ) from failure


def _draws(model: Layer, inputs: Nest) -> bool:
    """Whether a model draws random numbers in training."""
    args, named = arguments_of(copy_tensors(inputs))
    with undo_training(model), in_mode(model, training=True):
        before = generator_states()
        model(*args, **named)
        return generator_states() != before


def _steps(inputs: Sequence[Nest], planned: Sequence[Schedule]) -> list[TrainedStep]:
    """Returns steps that have each of the inputs as a micro-batch at least once."""
    optimizers = (paddle.optimizer.SGD, paddle.optimizer.Momentum)
    endless = itertools.cycle(inputs)
    steps: list[TrainedStep] = []
    while len(steps) < 2 or sum(len(step.micro_batches) for step in steps) < len(inputs):
        schedule = planned[len(steps) % len(planned)]
        micro_batches = list(itertools.islice(endless, schedule.micro_batches))
        kind = optimizers[len(steps) % len(optimizers)]
        steps.append(TrainedStep(micro_batches, schedule, kind, len(steps)))
    return steps


def _proof(
    expected: Digests, course: Course, rounded: dict[str, float], forms: Forms, keyed: bool
) -> Proof:
    """Returns the numbers of compared tensors, for a comparison that has passed."""
    names = {"output": list[str](), "gradient": list[str](), "state": list[str]()}
    for moment in expected.moments:
        names[moment.quantity] += moment.tensors
    trained = (n for n, p in forms.capturing.model.named_parameters() if not p.stop_gradient)
    return Proof(
        len(names["output"]),
        len({*names["gradient"]}),
        len({*names["state"]}.difference(trained)),
        rounded,
        reordered_sums(forms),
        keyed,
        tuple((step.schedule.name, len(step.micro_batches)) for step in course.steps),
        tuple(next((t.shape[0] for t in tensors_of(x) if t.ndim), 0) for x in course.evaluations),
    )


def planned_schedule(
    ranks: int, chunks: int | None, plan: PipelinePlan | None, stages: int
) -> Schedule | None:
    """Returns the strategy's schedule for at most ``MOST`` micro-batches, or as few as it takes.

    Args:
        ranks: Ranks of the pipeline.
        chunks: Chunks on each rank; None takes the schedule's own number.
        plan: The plan that the cut comes from; None if there is none.
        stages: The number of stages of the cut.

    Returns:
        None if the schedule cuts sequences, or has another number of stages, which is an error
        later.

    Raises:
        ConfigError: The strategy's schedule cannot be built.
        ScheduleError: The schedule exceeds the memory cap.
    """
    config = PipelineConfig.from_strategy(user_strategy())
    arrangement = Arrangement(ranks, chunks, use_dualpipev=False, plan=plan)
    schedule = None
    for count in range(min(MOST, config.micro_batches), config.micro_batches + 1):
        try:
            schedule = arrangement.schedule(config.resized(count, config.micro_batch_size))
            break
        except ConfigError:
            # Some schedules take only a multiple of the ranks.
            if count == config.micro_batches:
                raise
    fits = schedule is not None and schedule.slices == 1 and schedule.placement.stages == stages
    return schedule if fits else None


def reordered_sums(forms: Forms) -> tuple[str, ...]:
    """Returns the names of values and parameters whose gradients the stages sum in another order.

    Each stage adds up its own uses first. The sum of two uses of a value is the same in any order;
    the sum of a parameter is not, since it continues over all micro-batches.
    """
    form = forms.example(training=True)
    names = {id(p): name for name, p in forms.capturing.model.named_parameters()}
    weights: dict[str, set[int]] = {}
    values: dict[str, list[int]] = {}
    for stage in range(len(form.starts) + 1):
        for node in form.nodes(stage):
            for tensor in state_of(node):
                if not tensor.stop_gradient and id(tensor) in names:
                    weights.setdefault(names[id(tensor)], set()).add(stage)
            for value in node.uses:
                maker = form.trace.maker(value)
                if maker is not None and form.trace.likes[value].dtype.startswith(("f", "b")):
                    values.setdefault(form.trace.nodes[maker].name, []).append(stage)
    return (
        *(name for name, stages in weights.items() if len(stages) > 1),
        *(name for name, at in values.items() if len(at) > 2 and len({*at}) > 1),
    )


class _Endless(BaseException):
    """Ends a forward that runs too long; no ``Exception``, which a user's ``except`` could stop."""


class _Counted(Walk):
    """Counts operations, and ends a forward that makes too many."""

    def __init__(self, model: Layer, most: float) -> None:
        super().__init__(model, Unopened())
        self.count, self._most = 0, most

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Counts an operation, and runs it."""
        self.count += 1
        if self.count > self._most:
            raise _Endless
        return super().operation(function, args, named)


class Trial:
    """Finds the inputs that the plain model accepts."""

    def __init__(self, model: Layer) -> None:
        """Starts without a run; the first one sets the limit of operations."""
        self._model = model
        self._most = float("inf")

    def accepts(self, inputs: Nest, training: bool = True) -> bool:
        """Whether the model runs on inputs, comes to an end, and returns finite numbers."""
        args, named = arguments_of(copy_tensors(inputs))
        walk = _Counted(self._model, self._most)
        try:
            with undo_training(self._model), in_mode(self._model, training), intercepting(walk):
                output = self._model(*args, **named)
        except (Exception, _Endless):
            # What the model itself refuses is nothing to compare.
            return False
        self._most = min(self._most, _TIMES * walk.count + _MORE)
        return all(
            bool(paddle.isfinite(tensor).all())
            for tensor in tensors_of(output)
            if tensor.is_floating_point() and tensor.size
        )
