"""A static pipeline for one scope and device: its executors, its engine and its step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fleetpipe.aliases import Optimizer, Place, Scope, ScopeTensor
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.observer import Observers
from fleetpipe.engine.step_meter import StepMeter
from fleetpipe.engine.trace import Trace
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.paddle_api.optimizer import current_rate
from fleetpipe.paddle_api.static import dynamic, found_tensor, job_executor, share, tensor_of
from fleetpipe.schedules import Action, Fused, Plan
from fleetpipe.schedules.action import parts
from fleetpipe.static.cut import contract
from fleetpipe.static.cut.split import Split
from fleetpipe.static.run import reductions
from fleetpipe.static.run.random_streams import Streams
from fleetpipe.static.run.static_stage import ProgramRunner, StaticStage


@dataclass(frozen=True)
class Recipe:
    """The parts from which a pipeline is compiled.

    Attributes:
        split: The cut.
        plan: The lowered schedule.
        stages: This process's stages.
        update: The optimizer step; None if this process has nothing to train.
        optimizer: The user's optimizer.
        parameters: Names of the parameters that this process trains, sorted.
        shared: Names of the parameters that several ranks train, sorted.
        counted: Names of the parameters that this process counts for the global norm.
        limit: The limit of the global norm if the ranks clip together, else None.
        job: The job.
        trace: The trace that records steps; None without one.
    """

    split: Split
    plan: Plan
    stages: Mapping[int, contract.StageProgram]
    update: contract.Update | None
    optimizer: Optimizer
    parameters: list[str]
    shared: list[str]
    counted: list[str]
    limit: float | None
    job: Job
    trace: Trace | None

    def fetched(self, fetches: Iterable[int], stage: int) -> list[int]:
        """Returns the fetched values that a stage computes, ascending."""
        of = self.split.stage_of_value
        return sorted(number for number in fetches if of[number] == stage)

    def cut(self, fetches: frozenset[int]) -> dict[int, contract.Pieces]:
        """Cuts every stage so that fetched values can be read; needs static mode."""
        kinds = {
            stage: {
                action.kind
                for row in self.plan.ops
                for op in row
                if isinstance(op, (Action, Fused))
                for action in parts(op)
                if action.stage == stage
            }
            for stage in self.stages
        }
        return {
            stage: program.cut(
                {*self.fetched(fetches, stage), *self.split.readers(stage)}, kinds[stage]
            )
            for stage, program in self.stages.items()
        }


class Compiled:
    """Runs batches; a new one is built for another scope or device, or to fetch a new value."""

    def __init__(
        self,
        recipe: Recipe,
        pieces: Mapping[int, contract.Pieces],
        streams: Streams,
        fetches: frozenset[int],
        scope: Scope,
        place: Place,
    ) -> None:
        """Creates the executors; needs dynamic mode.

        Raises:
            ConfigError: The startup program has not run in ``scope``.
        """
        self.fetches, self.scope, self.place = fetches, scope, place
        self._recipe = recipe
        for name in recipe.parameters:
            self._zero(name)
        for name in () if recipe.update is None else recipe.update.variables:
            self._require(name, "optimizer's variable")
        runners = {
            stage: ProgramRunner(
                program,
                pieces[stage],
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
            name: dynamic(tensor_of(scope, recipe.split.names.accumulator(name)))
            for name in recipe.parameters
        }

    def reduce(self) -> None:
        """Turns the accumulators into those of the whole batch. Collective over the job."""
        recipe, job = self._recipe, self._recipe.job
        reductions.add_shared(self._gradients, recipe.shared, job.group())
        reductions.add_replicas(self._gradients, job.replicas())
        if recipe.limit is not None:
            norm = reductions.gradient_norm(self._gradients, recipe.counted, job.group())
            # Read where somebody looks.
            job.progress.gradient_norm = norm.item
            factor = reductions.clip_factor(norm, recipe.limit)
            share(tensor_of(self.scope, recipe.split.names.clip_factor), factor.get_tensor())

    def drop_gradients(self) -> None:
        """Sets the accumulators to 0, as before a batch that has broken off."""
        for gradient in self._gradients.values():
            gradient.zero_()

    def step(self) -> None:
        """Updates the parameters and sets the accumulators to 0."""
        update = self._recipe.update
        if update is None or self._run_step is None:
            return
        # Also of one that has no scheduler: set_lr may have changed it.
        tensor = tensor_of(self.scope, update.rate_name)
        numbers = np.full_like(np.array(tensor), current_rate(self._recipe.optimizer))
        tensor.set(numbers, self.place)
        self._run_step([], False)

    def _zero(self, parameter: str) -> None:
        """Creates a parameter's accumulator, filled with 0."""
        zeros = np.zeros_like(np.array(self._require(parameter, "parameter")))
        accumulator = self._recipe.split.names.accumulator(parameter)
        tensor_of(self.scope, accumulator).set(zeros, self.place)

    def _require(self, name: str, kind: str) -> ScopeTensor:
        """Returns the tensor of a variable that the startup program creates."""
        tensor = found_tensor(self.scope, name)
        if tensor is None:
            raise ConfigError(
                f"the {kind} {name!r} has no value",
                cause="the startup program has not run in this scope since minimize",
                fix="exe.run(paddle.static.default_startup_program()) after minimize, before the "
                "first batch",
            )
        return tensor
