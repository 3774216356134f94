"""Calls the user's hooks and times around the forwards and backwards of stages, as Fleet does.

Hooks of ``PipelineParallelMicroStepLocations`` are in one registry for all wrappers of a process.
The timers are those of ``pp_configs.enable_timer``, and wait for the GPU as Fleet's do. A trial is
a forward outside of a batch, such as a forward that is captured; its outputs are not recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fleetpipe import log
from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.stage_interfaces import Gradients
from fleetpipe.engine.observer import BatchObserver, Instruction, Played, Stopwatch
from fleetpipe.errors import StateError, UsageError
from fleetpipe.paddle_api.device import device_clock
from fleetpipe.paddle_api.meta_parallel import PipelineParallelMicroStepLocations as Locations
from fleetpipe.paddle_api.meta_parallel import pipeline_parallel_callbacks_
from fleetpipe.schedules import Action, Op, Recv, Schedule, Send
from fleetpipe.schedules.action import flatten

#: Whether :func:`trial` is open.
_trial = ContextVar("trial", default=False)

#: ``hook(number)`` is called before a forward, backward or bubble with its number.
NumberedHook = Callable[[int], object]

_log = log.logger(__name__)

#: How Fleet's names of timers spell sends and receives, and their directions.
_TRANSFERS = {"S": "send", "R": "recv"}
_DIRECTIONS = {"F": "forward", "B": "backward"}


@contextmanager
def trial() -> Iterator[None]:
    """A context in which forwards of this thread are trials, which belong to no batch."""
    token = _trial.set(True)
    try:
        yield
    finally:
        _trial.reset(token)


def is_trial() -> bool:
    """Whether :func:`trial` is open in this thread."""
    return _trial.get()


class NumberedHooks:
    """The hooks before the forwards, the backwards or the bubbles of a rank in a batch, by number.

    Attributes:
        hooks_capacity: The number of forwards, backwards or bubbles of a rank in a batch.
    """

    def __init__(self, kind: str, capacity: int) -> None:
        """Creates an empty registry of hooks.

        Args:
            kind: "forward", "backward" or "bubble", for messages.
            capacity: The number of forwards, backwards or bubbles of a rank in a batch.
        """
        self.hooks_capacity = capacity
        self._kind = kind
        self._hooks: defaultdict[int, list[NumberedHook]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def register_hook(self, location: int, hook: NumberedHook) -> None:
        """Adds a hook, called as ``hook(location)`` before the action or bubble of that number.

        Raises:
            UsageError: ``location`` is not below the capacity.
        """
        if location not in range(self.hooks_capacity):
            raise UsageError(
                f"there is no {self._kind} {location} for a hook",
                fix=f"give a number from 0 to {self.hooks_capacity - 1}"
                if self.hooks_capacity
                else f"register no {self._kind} hooks: this schedule has none",
            )
        self._hooks[location].append(hook)

    def run(self, number: int) -> None:
        """Calls the hooks before the forward, backward or bubble ``number``."""
        for hook in self._hooks.get(number, ()):
            hook(number)


class UserHooks:
    """All numbered hooks of a wrapped model.

    Attributes:
        forward: Called before each forward of a stage, m * v times on each rank.
        backward: Called before each B or I of a stage, m * v times on each rank.
        bubble: Called when a rank of p ranks has nothing to do, 2p - 2 times on each rank.
    """

    def __init__(self, schedule: Schedule, bubbles: int) -> None:
        """Creates empty registries of hooks.

        Args:
            schedule: The schedule that runs.
            bubbles: The number of bubbles; 0 if they have no hooks.
        """
        steps = schedule.units * schedule.placement.chunks
        self.forward = NumberedHooks("forward", steps)
        self.backward = NumberedHooks("backward", steps)
        self.bubble = NumberedHooks("bubble", bubbles)

    def __bool__(self) -> bool:
        return bool(self.forward or self.backward or self.bubble)


def bubbles_before(schedule: Schedule, rank: int) -> Counter[int]:
    """Returns the number of bubbles before each action of ``rank``, by the action's index.

    Rank r of p waits r times before its first forward and p-1-r times before its first backward.
    It waits p-1-r times before its last backwards and r times at the end of the batch, whose index
    is the number of actions.
    """
    row = list(flatten(schedule.actions[rank]))
    backwards = [index for index, action in enumerate(row) if action.kind in "BI"]
    behind = schedule.placement.ranks - 1 - rank
    bubbles = Counter({0: rank, len(row): rank})
    bubbles[backwards[0]] += behind
    last = backwards[-behind:] if behind else []
    bubbles.update(last)
    bubbles[len(row)] += behind - len(last)
    return bubbles


class HookCalls(BatchObserver):
    """Calls the hooks around the actions of stages; counts the actions of each rank played here.

    Attributes:
        hooks: The numbered hooks.
    """

    def __init__(self, schedule: Schedule, bubbles: int, ranks: Iterable[int]) -> None:
        """Creates empty registries; ``ranks`` are the ranks that this process plays."""
        self.hooks = UserHooks(schedule, bubbles)
        self._rank_of = schedule.placement.rank_of
        self._bubbles = {
            rank: bubbles_before(schedule, rank) if bubbles else Counter[int]() for rank in ranks
        }
        self._counts: Counter[tuple[str, int]] = Counter()
        self._training = False
        self._step_id: int | None = None

    def of_batch(self, training: bool) -> HookCalls | None:
        """Begins a batch: actions are counted from 0. Numbered hooks are called in training only.

        Returns:
            This object, to call around the batch's forwards and backwards; None if neither this
            wrapper nor the registry of all wrappers has a hook.
        """
        self._counts.clear()
        self._training = training
        return self if self.hooks or any(pipeline_parallel_callbacks_.hooks.values()) else None

    def end(self) -> None:
        """Calls the hooks of the bubbles after the last action of each rank."""
        if self.hooks.bubble:
            for rank in self._bubbles:
                self._run_bubble_hooks(rank)

    def before_forward(self, stage: int, value: Nest) -> None:
        """Calls the hooks before F."""
        self._step_id = self._count_action("forward", stage, self.hooks.forward)
        pipeline_parallel_callbacks_.on_location(
            Locations.FORWARD_BEGIN, input_tensor=value, step_id=self._step_id
        )

    def after_forward(self, stage: int, value: Nest, output: Nest) -> None:
        """Calls the hooks after F."""
        pipeline_parallel_callbacks_.on_location(
            Locations.FORWARD_END, input_tensor=value, output_tensor=output, step_id=self._step_id
        )

    def before_backward(
        self, stage: int, value: Nest, output: Nest, output_grads: Gradients
    ) -> None:
        """Calls the hooks before B or I."""
        self._step_id = self._count_action("backward", stage, self.hooks.backward)
        pipeline_parallel_callbacks_.on_location(
            Locations.BACKWARD_BEGIN,
            input_tensor=value,
            output_tensor=output,
            output_tensor_grad=_in_form_of(output, output_grads),
            step_id=self._step_id,
        )

    def after_backward(
        self, stage: int, value: Nest, output: Nest, output_grads: Gradients, input_grads: Gradients
    ) -> None:
        """Calls the hooks after B or I."""
        pipeline_parallel_callbacks_.on_location(
            Locations.BACKWARD_END,
            input_tensor=value,
            output_tensor=output,
            output_tensor_grad=_in_form_of(output, output_grads),
            input_tensor_grad=_in_form_of(value, input_grads),
            step_id=self._step_id,
        )

    def before_weight_grad(self, stage: int) -> None:
        """Counts action W, and calls the hooks of bubbles before it."""
        self._count_action("weight", stage, None)

    def _count_action(self, kind: str, stage: int, hooks: NumberedHooks | None) -> int | None:
        """Counts an action, and calls its numbered hooks and those of bubbles before it.

        Returns:
            The number of the action among its kind on the rank; None in evaluation.
        """
        if not self._training:
            return None
        rank = self._rank_of(stage)
        number = self._counts[kind, rank]
        self._run_bubble_hooks(rank)
        if hooks is not None:
            hooks.run(number)
        self._counts[kind, rank] += 1
        self._counts["action", rank] += 1
        return number

    def _run_bubble_hooks(self, rank: int) -> None:
        """Calls the hooks of the bubbles between the last action of a rank and its next one."""
        for _ in range(self._bubbles[rank][self._counts["action", rank]]):
            self.hooks.bubble.run(self._counts["bubble", rank])
            self._counts["bubble", rank] += 1


def _in_form_of(value: Nest, grads: Gradients) -> Tensor | Gradients:
    """Returns gradients in the form for hooks: a tensor if ``value`` is one, else a tuple."""
    if grads is None:
        return None
    return grads if isinstance(value, (tuple, list, dict)) else next(iter(grads), None)


class Timer:
    """Adds up the time between its starts and stops."""

    def __init__(self, name: str) -> None:
        """Creates a timer that has measured 0 seconds."""
        self.name = name
        self._elapsed = 0.0
        self._started: float | None = None
        self._clock = device_clock()

    @property
    def running(self) -> bool:
        """Whether the timer is started and not stopped."""
        return self._started is not None

    def start(self) -> None:
        """Starts the timer.

        Raises:
            StateError: The timer runs already.
        """
        if self.running:
            raise StateError(f"the timer {self.name} has been started already", fix="stop it first")
        self._started = self._clock()

    def stop(self) -> None:
        """Stops the timer.

        Raises:
            StateError: The timer does not run.
        """
        if self._started is None:
            raise StateError(f"the timer {self.name} has not been started", fix="start it first")
        self.add(self._clock() - self._started)
        self._started = None

    def add(self, seconds: float) -> None:
        """Adds time that was measured elsewhere."""
        self._elapsed += seconds

    def reset(self) -> None:
        """Stops the timer, and sets its time to 0."""
        self._elapsed = 0.0
        self._started = None

    def elapsed(self, reset: bool = True) -> float:
        """Returns the seconds so far; ``reset`` sets them to 0. A running timer continues."""
        running = self.running
        if running:
            self.stop()
        elapsed = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start()
        return elapsed


class Timers:
    """The timers of a wrapper, by name: ``timers("forward_step").elapsed()``.

    Attributes:
        timers: The timers that have been used.
    """

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Returns the timer of that name, which is created on its first use."""
        if name not in self.timers:
            self.timers[name] = Timer(name)
        return self.timers[name]

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """A context in which the timer of that name runs."""
        timer = self(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Logs the milliseconds of some timers as one line.

        Args:
            names: The names of the timers.
            normalizer: The number by which times are divided, such as a number of steps.
            reset: Whether to set the timers to 0.
        """
        texts = [
            f"{name}: {self.timers[name].elapsed(reset) * 1000.0 / normalizer:.2f}"
            for name in names
        ]
        _log.info(" | ".join(["time (ms)", *texts]))


class TimedActions(BatchObserver):
    """An observer that times actions and transfers, and logs all timers after a batch."""

    in_evaluation = True

    def __init__(self, timers: Timers) -> None:
        """Adds the times to ``timers``."""
        self._timers, self._clock = timers, device_clock()

    def end(self) -> None:
        """Called after a batch: logs all timers."""
        self._timers.log(self._timers.timers)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns an operation of the plan with a timer around it, if it is timed."""
        if isinstance(op, Action):
            name = "forward_step" if op.kind == "F" else "backward_step"
        elif isinstance(op, (Send, Recv)):
            name = f"{_TRANSFERS[op.letter]}_{_DIRECTIONS[op.kind]}"
        else:
            return instruction

        def add(begin: float, end: float) -> None:
            self._timers(name).add(end - begin)

        return Stopwatch(instruction, add, self._clock)
