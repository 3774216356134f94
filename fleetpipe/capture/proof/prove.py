"""Trains an untouched model and its captured stages alike, and compares them.

The plain loop runs first, on the user's own model, and leaves digests. Then the state is restored,
and the stages train the same course under their schedules. After each step they get the plain
model's parameters and buffers, so that a difference in rounding stays in its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fleetpipe import schedules
from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture.proof import verdict
from fleetpipe.capture.proof.comparison import Comparison, Digests, undo_training
from fleetpipe.capture.proof.data import Trial
from fleetpipe.capture.proof.hook_calls import Calls, count_hook_calls
from fleetpipe.capture.proof.models import CapturedRun, PlainLoop, copy_inputs
from fleetpipe.capture.proof.summation_order import reordered_sums
from fleetpipe.capture.proof.training import Course, TrainedStep, moments, state_of_model
from fleetpipe.capture.running.variants import Forms
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.place import raised_at
from fleetpipe.capture.tracing.walk import arguments_of
from fleetpipe.capture.variations import ALL, vary_example, with_another_row
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.errors import CaptureError, reason
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Schedule

#: Micro-batches of a step where no strategy says how many.
_MICRO_BATCHES = 3

#: What is run where no strategy says which.
_SCHEDULES = ("1F1B", "ZBH1")


class Proof(NamedTuple):
    """The extent of a comparison, in which all bits are equal but those of ``rounded`` gradients.

    Attributes:
        outputs: The number of tensors that the model returns, over all micro-batches.
        gradients: The number of parameters with a gradient.
        buffers: The number of buffers, running statistics among them.
        rounded: By parameter, the largest difference of its gradient, divided by the largest
            gradient of its layer, if the order of a sum explains it.
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
        schedule: The schedule that will train it; None takes one with a plain and one with a split
            backward.

    Raises:
        CaptureError: They differ; the error names the first layer that does, with file and line.
    """
    model = capturing.model
    python = forms.example(training=True).trace.draws
    keyed = python or _draws(model, capturing.example)

    def keys_of(step: TrainedStep) -> random_keys.Keys | None:
        return random_keys.Keys(step.draw, python) if keyed else None

    plain = PlainLoop(model, capturing.unopened, keys_of)
    expected, expected_calls = _train_plain(
        plain, _courses(capturing, [schedule] if schedule else _usual(forms.stages))
    )
    course = expected.course
    # They share the memory, which ``undo_training`` leaves to them.
    initial = {name: tensor.detach() for name, tensor in state_of_model(model).items()}
    with undo_training(model), count_hook_calls(model) as calls:
        comparison = Comparison(model, expected, initial)
        for moment in moments(model, CapturedRun(forms, model, keys_of), course):
            differing = comparison.differences(moment)
            if differing:
                raise verdict.refutation(capturing, forms, moment, differing, course, keys_of)
    if calls != expected_calls:
        raise verdict.unequal_hooks(model, calls, expected_calls)
    return _proof(expected, course, comparison.rounded, forms, keyed)


def _courses(capturing: Capturing, planned: Sequence[Schedule]) -> Iterator[Course]:
    """Yields courses to train: on varied numbers and rows, then on less in case a model fails."""
    trial = Trial(capturing.model)
    example = capturing.example
    inputs = [numbers for one in ALL if trial.accepts(numbers := vary_example(capturing, one))]
    rows = [example, with_another_row(capturing)]
    evaluations = [x for x in rows if x is not None and trial.accepts(x, training=False)]
    steps = _steps(inputs or [example], planned)
    yield Course(steps, evaluations)
    # After a step a model may fail on what it took before it.
    yield Course(steps, [])
    yield Course(_steps([example], planned), [])


def _train_plain(plain: PlainLoop, courses: Iterator[Course]) -> tuple[Digests, Calls]:
    """Trains the plain model; returns the digests, and the number of calls of hooks."""
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
    args, named = arguments_of(copy_inputs(inputs))
    with undo_training(model), in_mode(model, training=True):
        paddle.seed(1)
        untouched = paddle.rand([1])
        paddle.seed(1)
        model(*args, **named)
        after = paddle.rand([1])
    return bool((after != untouched).item())


def _usual(stages: int) -> list[Schedule]:
    count = max(_MICRO_BATCHES, stages)
    return [schedules.build(name, ranks=stages, micro_batches=count) for name in _SCHEDULES]


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
    names = {"output": list[str](), "gradient": list[str](), "state": list[str]()}
    for moment, digests in zip(expected.moments, expected.digests):
        names[moment.quantity] += digests
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
