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
from fleetpipe.capture.cutting.auto import tensors_used_by
from fleetpipe.capture.proof.training import (
    Calls,
    Comparison,
    Course,
    Digests,
    Moment,
    PlainTrainer,
    StagesTrainer,
    TrainedStep,
    count_hook_calls,
    run_course,
    state_of_model,
    undo_training,
)
from fleetpipe.capture.repeatability import ALL, vary_example, with_another_row
from fleetpipe.capture.running.replay import value_name
from fleetpipe.capture.running.stages import KeyedNodeFinder
from fleetpipe.capture.running.variants import StagedCapture, StagedCaptures
from fleetpipe.capture.tracing.capturing import Capturer, in_mode
from fleetpipe.capture.tracing.model_snapshot import state_kept
from fleetpipe.capture.tracing.user_lines import forward_location, raising_location
from fleetpipe.capture.tracing.value import Node, NodeCall, NodeFinder, Unopened, arguments_of
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

#: The cause in an error for stages that train otherwise than the model.
OUTSIDE_OF_PADDLE = (
    "the forward does something that is no operation of Paddle's on tensors: it keeps something "
    "from call to call, or computes outside of Paddle"
)
#: The fix in such an error.
_INTO_A_SUBLAYER = (
    "put that code into a sublayer, or its layer's class into no_split; where it is in one, "
    "keep what it counts in a buffer, written by set_value or paddle.assign"
)

#: The most micro-batches of a step, if a batch has more: enough for every phase of a schedule.
MOST = 8

#: A forward on other inputs may run at most ``_FACTOR`` times the example's operations and
#: ``_EXTRA`` more; with more it is taken for an endless loop.
_FACTOR, _EXTRA = 10, 1000

#: The number of micro-batches of a step, if there is no strategy.
_MICRO_BATCHES = 3

#: The schedules that train, if there is no strategy.
_SCHEDULES = ("1F1B", "ZBH1")


def training_difference_error(
    capturer: Capturer,
    captures: StagedCaptures,
    moment: Moment,
    differing: Sequence[str],
    course: Course,
    keys_of: Callable[[TrainedStep], random_keys.Keys | None],
) -> CaptureError:
    """Returns the error for a moment of the stages' training that differs from the plain model's.

    Args:
        capturer: The model with its example inputs, in its state at that moment.
        captures: The captured runs, cut into stages.
        moment: The moment of the stages' training.
        differing: The names of the tensors that differ.
        course: The steps and evaluations of the training.
        keys_of: Returns the random keys of a step; None if the model draws no random numbers.
    """
    training = moment.step < len(course.steps)
    staged = captures.of_example(training)
    node: Node | None = None
    if moment.quantity == "output":
        number = int(differing[0].rpartition(" ")[2])
        micro_batches = course.steps[moment.step].micro_batches if training else course.evaluations
        inputs = micro_batches[number]
        staged = captures.for_batch(capturer.signature_for(inputs), training)
        keys = keys_of(course.steps[moment.step]) if training else None
        node = find_first_differing_node(capturer, staged, copy_tensors(inputs), keys)
    names = [re.sub("^the mode of ", "", name) for name in differing]
    # Backward reaches the last node first; written state is wrong from the first node on.
    backwards = moment.quantity == "gradient"
    node = node or find_node_using(staged, capturer.model, names, backwards)
    where = f"{node.name}, {node.location}" if node else forward_location(capturer.model)
    writes = (
        f"; the forward writes into {name}, which {user.name} uses, {user.location}"
        for user in staged.trace.nodes
        for name in user.state & staged.trace.changed.keys()
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


def find_node_using(
    staged: StagedCapture, model: Layer, names: Sequence[str], backwards: bool
) -> Node | None:
    """Returns the first node that uses a named parameter or buffer, or calls a named layer.

    Args:
        staged: The captured run with the nodes.
        model: The model.
        names: The names of parameters, buffers and layers in the model.
        backwards: Whether the last such node is returned instead.

    Returns:
        The node; None if no node does.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {id(state[name]) for name in names if name in state}
    nodes = reversed(staged.trace.nodes) if backwards else iter(staged.trace.nodes)
    for node in nodes:
        if not tensors.isdisjoint(map(id, tensors_used_by(node))):
            return node
        if node.is_layer and node.scopes[-1].path in names:
            return node
    return None


class _OutputRecorder(KeyedNodeFinder):
    """Records the outputs of each node of the untouched model."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.outputs: list[list[Tensor]] = []

    def node(self, call: NodeCall) -> Any:
        """Calls a node, stores copies of its output tensors, and returns its output."""
        output = super().node(call)
        self.outputs.append([t.clone() if has_memory(t) else t for t in tensors_of(output)])
        return output


def find_first_differing_node(
    capturer: Capturer, staged: StagedCapture, inputs: Nest, keys: random_keys.Keys | None
) -> Node | None:
    """Returns the first node whose captured call returns other values than the plain model's.

    Both run forward in the current mode of the model. Returns None if all values are equal.

    Args:
        capturer: The model with its example inputs.
        staged: The captured run, cut into stages.
        inputs: One micro-batch.
        keys: The random keys of both; None if the model draws no random numbers.
    """
    model, (args, named) = capturer.model, arguments_of(copy_tensors(inputs))
    recorder = _OutputRecorder(model, capturer.unopened, keys)
    with paddle.no_grad(), random_keys.under_keys(keys, SoleGroup()):
        with state_kept(model), intercepting(recorder):
            model(*args, **named)
        with state_kept(model):
            values: Nest = staged.functions[0](inputs)
            calls = zip(staged.functions[1:-1], staged.trace.nodes, recorder.outputs)
            for number, (function, node, expected_outputs) in enumerate(calls):
                if keys is not None:
                    keys.enter(number + 1)
                values = function(values)
                outputs = [values.get(value_name(value)) for value in node.outputs]
                for output, expected in zip(outputs, expected_outputs):
                    has_value = output is not None and has_memory(output)
                    if has_value and not same_bits(output, expected):
                        return node
    return None


class Proof(NamedTuple):
    """The record of a comparison of the stages with the plain model that has passed.

    All bits are equal, except those of the gradients in ``rounded``.

    Attributes:
        outputs: The number of output tensors that were compared, over all micro-batches.
        gradients: The number of parameters whose gradients were compared.
        buffers: The number of buffers that were compared, running statistics among them.
        rounded: By parameter, the largest rounding difference of its gradient, divided by the
            largest gradient of its layer.
        summed: The names of values and parameters whose gradients several stages add up, each its
            own first.
        keyed: Whether the model draws random numbers; model and stages then drew the same.
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


def prove(capturer: Capturer, captures: StagedCaptures, schedule: Schedule | None = None) -> Proof:
    """Trains a model and its captured stages, compares them, and restores the model.

    Gradients are cleared.

    Args:
        capturer: The model with its example inputs.
        captures: The captured runs, cut into stages.
        schedule: The schedule that will train the model; None takes two, one with a full and one
            with a split backward.

    Raises:
        CaptureError: Model and stages differ; the error names the first different layer, with file
            and line.
    """
    model = capturer.model
    keyed = draws_in_python = captures.of_example(training=True).trace.draws
    if not draws_in_python:
        args, named = arguments_of(copy_tensors(capturer.example))
        with undo_training(model), in_mode(model, training=True):
            before = generator_states()
            model(*args, **named)
            keyed = generator_states() != before

    def keys_of(step: TrainedStep) -> random_keys.Keys | None:
        return random_keys.Keys(step.seed, draws_in_python) if keyed else None

    count = max(_MICRO_BATCHES, captures.stages)
    planned = (
        [schedule]
        if schedule
        else [
            schedules.build(name, ranks=captures.stages, micro_batches=count) for name in _SCHEDULES
        ]
    )
    plain = PlainTrainer(model, capturer.unopened, keys_of)
    expected, expected_calls = _train_plain(plain, _courses_to_try(capturer, planned))
    course = expected.course
    # These share memory with the model's tensors; ``undo_training`` restores it in place.
    initial = {name: tensor.detach() for name, tensor in state_of_model(model).items()}
    with undo_training(model), count_hook_calls(model) as calls:
        comparison = Comparison(model, expected, initial)
        for moment in run_course(model, StagesTrainer(captures, model, keys_of), course):
            differing = comparison.differences(moment)
            if differing:
                raise training_difference_error(
                    capturer, captures, moment, differing, course, keys_of
                )
    if calls != expected_calls:
        path = next(
            path for path in [*expected_calls, *calls] if calls[path] != expected_calls[path]
        )
        raise CaptureError(
            f"the captured stages call the hooks of {path} "
            f"{calls[path]} times, and the model calls them {expected_calls[path]} times",
            where=forward_location(dict(model.named_sublayers())[path]),
            cause="the layer is called in another way than by its name in the model",
            fix="put the hook on a sublayer, or the layer's class into no_split",
        )
    return _summarize(expected, course, comparison.rounded, captures, keyed)


def _courses_to_try(capturer: Capturer, planned: Sequence[Schedule]) -> Iterator[Course]:
    """Yields trainings on varied numbers and rows, then simpler ones in case the model fails.

    The steps of a training take the ``planned`` schedules in turn.
    """
    trial = Trial(capturer.model)
    example = capturer.example
    varied = (vary_example(capturer, variation) for variation in ALL)
    inputs = [numbers for numbers in varied if trial.accepts(numbers)]
    longer = with_another_row(capturer)
    candidates = [example] if longer is None else [example, longer]
    evaluations = [numbers for numbers in candidates if trial.accepts(numbers, training=False)]
    steps = _make_steps(inputs or [example], planned)
    yield Course(steps, evaluations)
    # After a step a model may fail in an evaluation that it passed before.
    yield Course(steps, [])
    yield Course(_make_steps([example], planned), [])


def _train_plain(plain: PlainTrainer, courses: Iterator[Course]) -> tuple[Digests, Calls]:
    """Trains the plain model by the first training that does not fail, and restores the model.

    Returns:
        The digests of the training, and the number of calls of each layer's hooks in it.

    Raises:
        CaptureError: The model fails in all trainings.
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
        where=raising_location(failure.__traceback__),
        cause="it was trained on example_inputs by a plain loop, to compare the pipeline with it",
        fix="train the plain model on such inputs first",
    ) from failure


def _make_steps(inputs: Sequence[Nest], planned: Sequence[Schedule]) -> list[TrainedStep]:
    """Returns at least two steps, with each of the inputs as a micro-batch at least once.

    The steps take the schedules in turn, and SGD and Momentum in turn.
    """
    optimizers = (paddle.optimizer.SGD, paddle.optimizer.Momentum)
    endless = itertools.cycle(inputs)
    steps: list[TrainedStep] = []
    while len(steps) < 2 or sum(len(step.micro_batches) for step in steps) < len(inputs):
        schedule = planned[len(steps) % len(planned)]
        micro_batches = list(itertools.islice(endless, schedule.micro_batches))
        kind = optimizers[len(steps) % len(optimizers)]
        steps.append(TrainedStep(micro_batches, schedule, kind, len(steps)))
    return steps


def _summarize(
    expected: Digests,
    course: Course,
    rounded: dict[str, float],
    captures: StagedCaptures,
    keyed: bool,
) -> Proof:
    """Returns the :class:`Proof` that records a comparison that has passed."""
    names = {"output": list[str](), "gradient": list[str](), "state": list[str]()}
    for moment in expected.moments:
        names[moment.quantity] += moment.tensors
    trained = (n for n, p in captures.capturer.model.named_parameters() if not p.stop_gradient)
    return Proof(
        len(names["output"]),
        len({*names["gradient"]}),
        len({*names["state"]}.difference(trained)),
        rounded,
        reordered_sums(captures),
        keyed,
        tuple((step.schedule.name, len(step.micro_batches)) for step in course.steps),
        tuple(next((t.shape[0] for t in tensors_of(x) if t.ndim), 0) for x in course.evaluations),
    )


def planned_schedule(
    ranks: int, chunks: int | None, plan: PipelinePlan | None, stages: int
) -> Schedule | None:
    """Returns the strategy's schedule for a proof.

    Of a batch's micro-batches it takes at most ``MOST``, or the next larger number that the
    schedule allows.

    Args:
        ranks: Ranks of the pipeline.
        chunks: Chunks on each rank; None takes the schedule's own number.
        plan: The plan that the cut comes from; None if there is none.
        stages: The number of stages of the cut.

    Returns:
        The schedule; None if it cuts sequences, or has another number of stages, which is an error
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


def reordered_sums(captures: StagedCaptures) -> tuple[str, ...]:
    """Returns the names of parameters and values whose gradients the stages sum in another order.

    Each stage adds up its own uses first. This changes the gradient of a parameter that two stages
    use, since its sum continues over all micro-batches; and that of a value with three uses or
    more, since the sum of two is the same in any order. A value has the name of the node that makes
    it.
    """
    staged = captures.of_example(training=True)
    names = {id(p): name for name, p in captures.capturer.model.named_parameters()}
    stages_of_weight: dict[str, set[int]] = {}
    stages_of_uses: dict[str, list[int]] = {}
    for stage in range(len(staged.starts) + 1):
        for node in staged.nodes(stage):
            for tensor in tensors_used_by(node):
                if not tensor.stop_gradient and id(tensor) in names:
                    stages_of_weight.setdefault(names[id(tensor)], set()).add(stage)
            for value in node.uses:
                maker = staged.trace.maker(value)
                if maker is not None and staged.trace.specs[value].dtype.startswith(("f", "b")):
                    name = staged.trace.nodes[maker].name
                    stages_of_uses.setdefault(name, []).append(stage)
    return (
        *(name for name, stages in stages_of_weight.items() if len(stages) > 1),
        *(name for name, uses in stages_of_uses.items() if len(uses) > 2 and len({*uses}) > 1),
    )


class _TooManyOperations(BaseException):
    """Ends a forward that runs too long.

    It is not an ``Exception``, which an ``except`` in the user's code could stop.
    """


class _OperationCounter(NodeFinder):
    """Counts the operations of a forward, and ends a forward that makes too many."""

    def __init__(self, model: Layer, limit: float) -> None:
        super().__init__(model, Unopened())
        self.count, self._limit = 0, limit

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Counts an operation, runs it, and returns its output."""
        self.count += 1
        if self.count > self._limit:
            raise _TooManyOperations
        return super().operation(function, args, named)


class Trial:
    """Tries inputs on the plain model, to find those that it accepts."""

    def __init__(self, model: Layer) -> None:
        """Stores the model. The first run sets how many operations later runs may make."""
        self._model = model
        self._limit = float("inf")

    def accepts(self, inputs: Nest, training: bool = True) -> bool:
        """Returns whether the model runs on inputs, comes to an end, and returns finite numbers."""
        args, named = arguments_of(copy_tensors(inputs))
        counter = _OperationCounter(self._model, self._limit)
        try:
            with undo_training(self._model), in_mode(self._model, training), intercepting(counter):
                output = self._model(*args, **named)
        except (Exception, _TooManyOperations):
            # What the model itself refuses is nothing to compare.
            return False
        self._limit = min(self._limit, _FACTOR * counter.count + _EXTRA)
        return all(
            bool(paddle.isfinite(tensor).all())
            for tensor in tensors_of(output)
            if tensor.is_floating_point() and tensor.size
        )
