"""The hooks that users may put around the forwards and backwards of a stage.

There are two kinds, as in Fleet. Hooks of ``PipelineParallelMicroStepLocations`` are in one
registry for all wrappers of a process, and get the values of a forward or backward. Numbered hooks
are called before the i-th forward, backward or bubble of this rank in a training batch. A batch
without hooks runs without calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.dygraph_stage import Gradients
from fleetpipe.engine.observer import BatchObserver
from fleetpipe.errors import UsageError
from fleetpipe.paddle_api.meta_parallel import PipelineParallelMicroStepLocations as Locations
from fleetpipe.paddle_api.meta_parallel import pipeline_parallel_callbacks_
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.action import flatten

NumberedHook = Callable[[int], object]


class NumberedHooks:
    """Hooks by the number of the forward, backward or bubble before which they are called.

    Attributes:
        hooks_capacity: The number of forwards, backwards or bubbles of a rank in a batch.
    """

    def __init__(self, kind: str, capacity: int) -> None:
        """Starts without hooks.

        Args:
            kind: "forward", "backward" or "bubble", for messages.
            capacity: The number of them on a rank in a batch.
        """
        self.hooks_capacity = capacity
        self._kind = kind
        self._hooks: defaultdict[int, list[NumberedHook]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def register_hook(self, location: int, hook: NumberedHook) -> None:
        """Adds ``hook(location)``.

        Raises:
            UsageError: There is no such number in a batch.
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
        """Calls the hooks of a number."""
        for hook in self._hooks.get(number, ()):
            hook(number)


class UserHooks:
    """All numbered hooks of a wrapper.

    Attributes:
        forward: Called before each forward of a stage, m * v times on each rank.
        backward: Called before each backward, or the I of a split one, as often.
        bubble: Called when one of p ranks has nothing to do, 2p - 2 times.
    """

    def __init__(self, schedule: Schedule, bubbles: int) -> None:
        """Starts without hooks.

        Args:
            schedule: The schedule that is run.
            bubbles: The number of bubbles; 0 if they have no hooks.
        """
        steps = schedule.units * schedule.placement.chunks
        self.forward = NumberedHooks("forward", steps)
        self.backward = NumberedHooks("backward", steps)
        self.bubble = NumberedHooks("bubble", bubbles)

    def __bool__(self) -> bool:
        return bool(self.forward or self.backward or self.bubble)


def bubbles_before(schedule: Schedule, rank: int) -> Counter[int]:
    """Returns how many bubbles of ``rank`` come before each of its compute actions.

    Rank r of p waits r times before its first forward and p-1-r times before its first backward,
    and as often on the way back. The key for the end of the batch is the number of its actions.
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
    """Calls the hooks around the actions of stages, and counts them for each rank played here.

    Attributes:
        hooks: The numbered hooks.
    """

    def __init__(self, schedule: Schedule, bubbles: int, ranks: Iterable[int]) -> None:
        """Starts without hooks; ``ranks`` are those that this process plays."""
        self.hooks = UserHooks(schedule, bubbles)
        self._rank_of = schedule.placement.rank_of
        self._bubbles = {
            rank: bubbles_before(schedule, rank) if bubbles else Counter[int]() for rank in ranks
        }
        self._done: Counter[tuple[str, int]] = Counter()
        self._training = False
        self._step: int | None = None

    def of_batch(self, training: bool) -> HookCalls | None:
        """Restarts the counts; numbered hooks are called in training only.

        Returns:
            The observer of the batch's forwards and backwards; None if there is no hook, neither of
            this wrapper nor in the registry for all.
        """
        self._done.clear()
        self._training = training
        return self if self.hooks or any(pipeline_parallel_callbacks_.hooks.values()) else None

    def end(self) -> None:
        """Calls the hooks of bubbles behind the last action of each rank."""
        if self.hooks.bubble:
            for rank in self._bubbles:
                self._bubble(rank)

    def before_forward(self, stage: int, value: Nest) -> None:
        """See :class:`StageHooks`."""
        self._step = self._count("forward", stage, self.hooks.forward)
        pipeline_parallel_callbacks_.on_location(
            Locations.FORWARD_BEGIN, input_tensor=value, step_id=self._step
        )

    def after_forward(self, stage: int, value: Nest, output: Nest) -> None:
        """See :class:`StageHooks`."""
        pipeline_parallel_callbacks_.on_location(
            Locations.FORWARD_END, input_tensor=value, output_tensor=output, step_id=self._step
        )

    def before_backward(
        self, stage: int, value: Nest, output: Nest, output_grads: Gradients
    ) -> None:
        """See :class:`StageHooks`."""
        self._step = self._count("backward", stage, self.hooks.backward)
        pipeline_parallel_callbacks_.on_location(
            Locations.BACKWARD_BEGIN,
            input_tensor=value,
            output_tensor=output,
            output_tensor_grad=_shaped_like(output, output_grads),
            step_id=self._step,
        )

    def after_backward(
        self, stage: int, value: Nest, output: Nest, output_grads: Gradients, input_grads: Gradients
    ) -> None:
        """See :class:`StageHooks`."""
        pipeline_parallel_callbacks_.on_location(
            Locations.BACKWARD_END,
            input_tensor=value,
            output_tensor=output,
            output_tensor_grad=_shaped_like(output, output_grads),
            input_tensor_grad=_shaped_like(value, input_grads),
            step_id=self._step,
        )

    def before_weight_grad(self, stage: int) -> None:
        """See :class:`StageHooks`."""
        self._count("weight", stage, None)

    def _count(self, kind: str, stage: int, hooks: NumberedHooks | None) -> int | None:
        """Calls the numbered hooks of this action, and returns its number; None in evaluation."""
        if not self._training:
            return None
        rank = self._rank_of(stage)
        number = self._done[kind, rank]
        self._bubble(rank)
        if hooks is not None:
            hooks.run(number)
        self._done[kind, rank] += 1
        self._done["action", rank] += 1
        return number

    def _bubble(self, rank: int) -> None:
        for _ in range(self._bubbles[rank][self._done["action", rank]]):
            self.hooks.bubble.run(self._done["bubble", rank])
            self._done["bubble", rank] += 1


def _shaped_like(value: Nest, grads: Gradients) -> Tensor | Gradients:
    """Returns the gradient of a single tensor by itself; for several, the tuple of gradients."""
    if grads is None:
        return None
    return grads if isinstance(value, (tuple, list, dict)) else next(iter(grads), None)
