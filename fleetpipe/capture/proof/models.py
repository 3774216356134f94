"""The two sides of a proof: the user's model in a plain loop, and its captured stages."""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.proof.training import TrainedStep, loss_of, weights_of
from fleetpipe.capture.running.plain_model import call_keyed
from fleetpipe.capture.running.stages import CapturedStages
from fleetpipe.capture.running.variants import Forms
from fleetpipe.capture.tracing.walk import Unopened, Walk, arguments_of
from fleetpipe.dygraph import random_keys, weighted
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.dygraph_stage import Batch, DygraphStage
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.nest import map_tensors
from fleetpipe.dygraph.random_keys import Keys
from fleetpipe.engine.engine import Engine
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.operations import intercepting
from fleetpipe.schedules import Placement, Plan, Schedule, forward_only
from fleetpipe.schedules.action import GlobalMicroBatch
from fleetpipe.transport import MemoryHub

#: Nothing is ever waited for in one process.
_NO_WAIT = 1.0

_FIRST = GlobalMicroBatch(0)


def copy_inputs(inputs: Nest) -> Nest:
    """Returns copies of inputs, which a forward may overwrite."""
    return map_tensors(lambda tensor: tensor.clone(), inputs)


class PlainLoop:
    """Trains the untouched model, one micro-batch after another."""

    def __init__(
        self, model: Layer, unopened: Unopened, keys_of: Callable[[TrainedStep], Keys | None]
    ) -> None:
        """Takes the model.

        Args:
            model: The model.
            unopened: The layers that are single nodes: each node has a random key of its own.
            keys_of: Returns the random keys of a step; None if nothing is drawn.
        """
        self.model, self._unopened, self._keys_of = model, unopened, keys_of

    def train(self, step: TrainedStep) -> list[Nest]:
        """Runs forward and backward of each micro-batch; see :class:`Side`."""
        outputs = []
        for number, inputs in enumerate(step.micro_batches):
            keys = self._keys_of(step)
            micro_batch = GlobalMicroBatch(number)
            output = call_keyed(self.model, copy_inputs(inputs), self._unopened, keys, micro_batch)
            weighted(loss_of(output), weights_of(step)[number]).backward()
            outputs.append(map_tensors(lambda tensor: tensor.detach(), output))
        return outputs

    def evaluate(self, inputs: Nest) -> Nest:
        """Runs one forward; see :class:`Side`."""
        args, named = arguments_of(inputs)
        # As the stages do, without gradients; a hook on one is no error then.
        with paddle.no_grad(), intercepting(Walk(self.model, self._unopened)):
            return self.model(*args, **named)


class CapturedRun:
    """Trains the captured stages, all in this process, under the schedule of each step."""

    def __init__(
        self, forms: Forms, model: Layer, keys_of: Callable[[TrainedStep], Keys | None]
    ) -> None:
        """Takes the captured runs of the forward.

        Args:
            forms: The captured runs.
            model: The model, whose mode selects the run.
            keys_of: Returns the random keys of a step; None if nothing is drawn.
        """
        self._forms, self._keys_of = forms, keys_of
        self._parts = CapturedStages(forms, lambda: model.training)

    def train(self, step: TrainedStep) -> list[Nest]:
        """Runs the plan of the step; see :class:`Side`."""
        outputs: list[Nest] = [None] * len(step.micro_batches)

        def loss(output: Nest, number: int) -> Tensor:
            outputs[number] = map_tensors(lambda tensor: tensor.detach(), output)
            return loss_of(output)

        plan = step.schedule.lower(self._parts.edges(training=True))
        stage = self._stage(step.schedule)
        numbers = list(range(len(step.micro_batches)))
        batches = MicroBatches([copy_inputs(inputs) for inputs in step.micro_batches], numbers)
        stage.begin(Batch(batches, Losses([loss], weights_of(step))))
        try:
            with random_keys.under_keys(self._keys_of(step), SoleGroup()):
                collectives = dict.fromkeys(("REDUCE", "STEP"), lambda: None)
                _engine(plan, stage).run(collectives, _FIRST)
        finally:
            stage.end()
        return outputs

    def evaluate(self, inputs: Nest) -> Nest:
        """Runs one micro-batch forward; see :class:`Side`."""
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
    hub = MemoryHub(plan.placement.ranks)
    endpoints = {rank: hub.endpoint(rank) for rank in range(plan.placement.ranks)}
    return Engine(plan, stage, endpoints, _NO_WAIT)
