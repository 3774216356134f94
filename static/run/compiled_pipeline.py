"""A static pipeline for one scope and device: its executors, its engine and its step.

Before a step, gradients are summed over ranks: of tied weights and of replicas, and for the norm of
all gradients. This runs in dynamic mode, on tensors that share the data of the scope's variables.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fleetpipe.aliases import Optimizer, Place, Scope, ScopeTensor, Tensor
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.observer import Observers
from fleetpipe.engine.step_meter import StepMeter
from fleetpipe.engine.trace import Trace
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.job.optimizer_table import require_clip
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import current_rate, gradient_clip
from fleetpipe.paddle_api.static import (
    dynamic_tensor,
    found_tensor,
    job_executor,
    share_data,
    tensor_of,
)
from fleetpipe.schedules import Action, Fused, Plan
from fleetpipe.schedules.action import parts
from fleetpipe.static import cut
from fleetpipe.static.cut import Split
from fleetpipe.static.run.static_stage import ProgramRunner, StaticStage, Streams


def sum_tied_gradients(gradients: Mapping[str, Tensor], names: Sequence[str], group: Group) -> None:
    """Sums the gradients of tied parameters over the ranks that use them, in place.

    Collective over the pipeline. All ranks add in the order of the ranks, and so get the same bits.

    Args:
        gradients: The accumulators of this rank's parameters, dynamic tensors by name.
        names: The parameters that several ranks use, the same on all ranks.
        group: The ranks of the pipeline.
    """
    if not names or group.ranks == 1:
        return
    local = {name: gradients[name].clone() for name in names if name in gradients}
    gradients_by_rank = group.all_gather(local)
    for name in local:
        terms = [by_name[name] for by_name in gradients_by_rank if name in by_name]
        paddle.assign(functools.reduce(operator.add, terms), gradients[name])


def global_norm_limit(optimizer: Optimizer, job: Job) -> float | None:
    """Returns the limit to which an optimizer clips the global norm; None without such a clip.

    Raises:
        ConfigError: The clip is not known to be right over several processes.
    """
    clip = gradient_clip(optimizer)
    is_supported = require_clip(clip, job)
    if not is_supported or not isinstance(clip, paddle.nn.ClipGradByGlobalNorm):
        return None
    return float(clip.clip_norm)


def gradient_norm(gradients: Mapping[str, Tensor], counted: Sequence[str], group: Group) -> Tensor:
    """Returns the norm of the gradients of all ranks, float32 of shape [1].

    Collective over the pipeline. Each gradient is counted on one rank. The squares are added up in
    the order of the names, as in Paddle.

    Args:
        gradients: Gradients of this rank's parameters, dynamic tensors by name.
        counted: The names of the gradients that this rank counts.
        group: The ranks of the pipeline.
    """
    # The sum of the squares of each counted gradient, by name.
    local = {name: (gradients[name] * gradients[name]).sum() for name in counted}
    squares: dict[str, Tensor] = {}
    for by_name in group.all_gather(local):
        squares.update(by_name)
    ordered = [squares[name].reshape([1]).astype("float32") for name in sorted(squares)]
    return paddle.sqrt(paddle.add_n(ordered))


@dataclass(frozen=True)
class Recipe:
    """What a pipeline is compiled from: the same for every scope, device and fetch.

    Attributes:
        split: The cut.
        plan: The lowered schedule.
        stages: This process's stages.
        update: The optimizer step; None if this process has nothing to train.
        optimizer: The user's optimizer.
        parameters: Names of the parameters that this process trains, sorted.
        shared: Names of the tied parameters, which several ranks of the pipeline train, sorted.
        counted: Names of the parameters that this process counts in the global norm; a tied one is
            counted on one of its ranks.
        limit: The largest global norm of gradients if the ranks clip together, else None.
        job: The job.
        trace: The trace that records steps; None for no trace.
    """

    split: Split
    plan: Plan
    stages: Mapping[int, cut.StageProgram]
    update: cut.Update | None
    optimizer: Optimizer
    parameters: list[str]
    shared: list[str]
    counted: list[str]
    limit: float | None
    job: Job
    trace: Trace | None

    def fetched(self, fetches: Iterable[int], stage: int) -> list[int]:
        """Returns the values in ``fetches``, by number, that a stage computes, ascending."""
        stage_of_value = self.split.stage_of_value
        return sorted(number for number in fetches if stage_of_value[number] == stage)

    def cut(self, fetches: frozenset[int]) -> dict[int, cut.NativePrograms]:
        """Returns the programs of each stage of this process; needs static mode.

        Args:
            fetches: The values to fetch, which the stages export.
        """
        actions = [
            action
            for row in self.plan.ops
            for op in row
            if isinstance(op, (Action, Fused))
            for action in parts(op)
        ]
        kinds = {
            stage: {action.kind for action in actions if action.stage == stage}
            for stage in self.stages
        }
        return {
            stage: program.cut(
                {*self.fetched(fetches, stage), *self.split.readers(stage)}, kinds[stage]
            )
            for stage, program in self.stages.items()
        }


class Compiled:
    """Runs batches in one scope on one device, and fetches a fixed set of values.

    An accumulator is the scope's variable in which the micro-batches of a batch add up the gradient
    of a parameter.

    Attributes:
        fetches: The values that can be fetched, by their numbers in the split.
        scope: The scope of the variables.
        place: The device.
        stage: The stages of this process, as the engine runs them.
        observers: What watches the batches: a trace, if any, and the meter of steps.
        engine: Runs the operations of the plan.
    """

    def __init__(
        self,
        recipe: Recipe,
        programs: Mapping[int, cut.NativePrograms],
        streams: Streams,
        fetches: frozenset[int],
        scope: Scope,
        place: Place,
    ) -> None:
        """Creates the executors; needs dynamic mode.

        Args:
            recipe: What the pipeline is compiled from.
            programs: The programs of each stage of this process.
            streams: The random streams of the stages.
            fetches: The values that can be fetched, by their numbers in the split.
            scope: The scope of the variables.
            place: The device.

        Raises:
            ConfigError: The startup program has not run in ``scope``.
        """
        self.fetches, self.scope, self.place = fetches, scope, place
        self._recipe = recipe
        for name in recipe.parameters:
            zeros = np.zeros_like(np.array(self._initialized_tensor(name, "parameter")))
            tensor_of(scope, recipe.split.names.accumulator(name)).set(zeros, place)
        for name in () if recipe.update is None else recipe.update.variables:
            self._initialized_tensor(name, "optimizer's variable")
        runners = {
            stage: ProgramRunner(
                program,
                programs[stage],
                recipe.split,
                stage,
                recipe.fetched(fetches, stage),
                scope,
                place,
            )
            for stage, program in recipe.stages.items()
        }
        self.stage = StaticStage(runners, streams)
        ranks = recipe.job.pipeline_ranks()
        meter = StepMeter(recipe.plan, ranks, recipe.job.progress, not recipe.job.local)
        self.observers = Observers(*([] if recipe.trace is None else [recipe.trace]), meter)
        connections, timeout = recipe.job.connect(), recipe.job.timeout
        self.engine = Engine(recipe.plan, self.stage, connections, timeout, [self.observers])
        self._run_step = None
        if recipe.update is not None:
            tensor_of(scope, recipe.split.names.clip_factor)
            self._run_step = job_executor(recipe.update.step, scope, place).run
        self._gradients = {
            name: dynamic_tensor(tensor_of(scope, recipe.split.names.accumulator(name)))
            for name in recipe.parameters
        }

    def reduce(self) -> None:
        """Sums the accumulated gradients over ranks, and sets the clip factor.

        Collective over the job. Gradients of tied parameters are summed over the pipeline's ranks
        that use them, then all gradients over the replicas. For the global norm each parameter is
        counted once, on one of its ranks.
        """
        recipe, job = self._recipe, self._recipe.job
        sum_tied_gradients(self._gradients, recipe.shared, job.group())
        if job.replicas().ranks > 1:
            job.replicas().all_reduce([self._gradients[name] for name in sorted(self._gradients)])
        if recipe.limit is not None:
            norm = gradient_norm(self._gradients, recipe.counted, job.group())
            # The method, not its result: it waits for the device, and is called when somebody
            # reads the progress of the job.
            job.progress.gradient_norm = norm.item
            limit = paddle.full([1], recipe.limit, "float32")
            factor = limit / paddle.clip(norm, min=recipe.limit)
            share_data(tensor_of(self.scope, recipe.split.names.clip_factor), factor.get_tensor())

    def drop_gradients(self) -> None:
        """Sets the accumulators to 0, after a batch that has failed."""
        for gradient in self._gradients.values():
            gradient.zero_()

    def step(self) -> None:
        """Updates the parameters and sets the accumulators to 0."""
        update = self._recipe.update
        if update is None or self._run_step is None:
            return
        # The rate is set before each step, also without a scheduler: set_lr may have changed it.
        tensor = tensor_of(self.scope, update.rate_name)
        numbers = np.full_like(np.array(tensor), current_rate(self._recipe.optimizer))
        tensor.set(numbers, self.place)
        self._run_step([], False)

    def _initialized_tensor(self, name: str, kind: str) -> ScopeTensor:
        """Returns the tensor of a variable; refuses a variable that has no value yet.

        Args:
            name: The variable.
            kind: What the variable is, for the error message.
        """
        tensor = found_tensor(self.scope, name)
        if tensor is None:
            raise ConfigError(
                f"the {kind} {name!r} has no value",
                cause="the startup program has not run in this scope since minimize",
                fix="exe.run(paddle.static.default_startup_program()) after minimize, before the "
                "first batch",
            )
        return tensor
