"""Runs the schedules of ``paddle.distributed.auto_parallel.pipelining`` on the engine.

A script cuts its model itself, wraps the layers of each rank as ``PipelineStage``, and calls
``schedule.step``. Between CPU ranks Paddle's own exchange deadlocks for 30 s: under 1F1B two ranks
send to each other, and each waits until the other receives. Here Paddle's schedule becomes one of
fleetpipe's, which is verified before any rank waits, and values go over the job's connections. The
results are Paddle's: gradients are summed over micro-batches, and the optimizer, the learning rate
and the random numbers are the script's. Start with ``on_engine``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any
from weakref import WeakKeyDictionary

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.stage_interfaces import Batch
from fleetpipe.dygraph.layers.run_stage import Run
from fleetpipe.dygraph.nest import map_tensors
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.stage import Values
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.lifecycle import init
from fleetpipe.fleet.strategy import DistributedStrategy
from fleetpipe.job import meeting
from fleetpipe.job.job import Job, current_job
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.pipelining import MicroBatchData, PaddleSchedule, local_tensor, stepping
from fleetpipe.schedules import Action, Placement, Schedule, build, forward_only
from fleetpipe.schedules.action import GlobalMicroBatch
from fleetpipe.schedules.placement import SHAPES
from fleetpipe.transport import MemoryHub, Transport

#: The names of Paddle's schedules with one stage on each rank, and fleetpipe's names of them.
_NAMES_HERE = {"ScheduleFThenB": "FThenB", "Schedule1F1B": "1F1B"}

#: The runner of each of Paddle's schedules that has run a batch.
_runners: WeakKeyDictionary[Any, _ScheduleRunner] = WeakKeyDictionary()


class _LocalGradientStage(DygraphStage):
    """Runs stages whose weights may be Paddle's distributed tensors, each of them on one rank."""

    def backward(self, stage: int, micro_batch: GlobalMicroBatch, output_grads: Values) -> Values:
        """Runs a backward, and converts the gradients from distributed to local tensors."""
        grads = super().backward(stage, micro_batch, output_grads)
        return {edge: map_tensors(local_tensor, grad) for edge, grad in grads.items()}


class _ScheduleRunner:
    """Runs the batches of one of Paddle's schedules on fleetpipe's engine."""

    def __init__(self, paddle_schedule: PaddleSchedule) -> None:
        """Makes the engine. Collective over the ranks of the schedule's group.

        Args:
            paddle_schedule: Reads and fills Paddle's schedule and stages.

        Raises:
            ConfigError: fleetpipe has no placement with these stages, or the ranks have different
                schedules.
            ScheduleError: Its order is incomplete, or deadlocks.
        """
        self._paddle_schedule = paddle_schedule
        schedule = schedule_of(paddle_schedule)
        plan = schedule.lower()
        plan.verify()
        job = self._job = _required_job()
        self._data = MicroBatchData([], [], None)
        self._needs_targets = paddle_schedule.trains and paddle_schedule.has_last
        split = SplitBackward(schedule, lambda stage: {stage: paddle_schedule.layers[stage]}, False)

        def run_of(stage: int) -> Run:
            return functools.partial(self._forward, stage)

        self._stage = _LocalGradientStage(run_of, schedule.placement, split)
        transports: dict[int, Transport] = {0: MemoryHub(1).endpoint(0)}
        if job is not None:
            transports = job.connect_among(paddle_schedule.members)
            with job.guarded(lambda: "comparing the schedules of a pipeline"):
                _require_equal_schedules(
                    job.members(paddle_schedule.members).all_gather(str(schedule))
                )
        self._engine = Engine(plan, self._stage, transports, job.timeout if job else 0.0)

    def step(self, data: MicroBatchData, losses: list[Tensor] | None) -> None:
        """Runs a batch. Collective over the ranks of the schedule's group.

        Args:
            data: The micro-batches; only the arguments of the first stage count.
            losses: The list that gets the losses of micro-batches on the rank with the last stage.
        """
        data = self._data = self._paddle_schedule.begin(data, losses)
        if self._needs_targets and data.targets is None:
            raise ConfigError(
                "this rank owns the last stage and was given no target",
                got="schedule.step(..) without target, and a schedule with loss_fn",
                fix="schedule.step(inputs, target=labels) on this rank",
            )
        weights = [Fraction(1)] * self._paddle_schedule.micro_batches
        functions = Losses([self._loss], weights) if self._paddle_schedule.trains else None
        batch = Batch(MicroBatches(data.arguments, data.targets), functions)
        job, engine = self._job, self._engine
        self._stage.begin(batch)
        try:
            with nullcontext() if job is None else job.guarded(engine.where):
                engine.run({"REDUCE": self._add_shared, "STEP": lambda: None})
            self._paddle_schedule.keep(batch.ordered_outputs())
            self._paddle_schedule.end(losses)
        finally:
            self._stage.end()

    def _forward(self, stage: int, value: Nest, number: GlobalMicroBatch) -> Nest:
        """Runs a stage on a micro-batch; if another stage follows, returns local tensors."""
        arguments = value if isinstance(value, (tuple, list)) else (value,)
        output = self._paddle_schedule.layers[stage](*arguments, **self._data.keywords[number])
        is_last = stage == self._paddle_schedule.stages - 1
        return output if is_last else map_tensors(local_tensor, output)

    def _loss(self, output: Nest, target: Nest) -> Tensor:
        """Returns the loss of a micro-batch, and stores its output in Paddle's schedule."""
        loss = self._paddle_schedule.loss(output, target)
        self._paddle_schedule.keep([map_tensors(lambda tensor: tensor.detach(), output)])
        return loss

    def _add_shared(self) -> None:
        """Adds up the gradients of weights that stages on several ranks share. Collective."""
        for ranks, gradient in self._paddle_schedule.shared():
            if self._job is not None and len(ranks) > 1:
                self._job.members(ranks).all_reduce([gradient])


def schedule_of(paddle_schedule: PaddleSchedule) -> Schedule:
    """Converts a schedule of Paddle's to a schedule of fleetpipe's.

    Raises:
        ConfigError: fleetpipe has no placement with these stages on each rank.
        ScheduleError: Its order is incomplete, or deadlocks.
    """
    placement = _placement(paddle_schedule)
    if not paddle_schedule.trains:
        return forward_only(placement, paddle_schedule.micro_batches)
    if paddle_schedule.rows is None:
        name = _NAMES_HERE[paddle_schedule.name]
        return build(name, ranks=placement.ranks, micro_batches=paddle_schedule.micro_batches)
    rows = tuple(tuple(Action(*entry) for entry in row) for row in paddle_schedule.rows)
    schedule = Schedule(paddle_schedule.name, placement, paddle_schedule.micro_batches, rows)
    schedule.verify()
    return schedule


def _placement(paddle_schedule: PaddleSchedule) -> Placement:
    """Returns fleetpipe's placement with the same stages on each rank as Paddle's schedule.

    Raises:
        ConfigError: There is no such placement, or this rank was given other stages.
    """
    ranks = len(paddle_schedule.members)
    chunks = paddle_schedule.stages // ranks
    for name in (name for name, shape in SHAPES.items() if shape.allows(chunks)):
        placement = Placement(name, ranks, chunks)
        if [*map(placement.rank_of, range(placement.stages))] == paddle_schedule.rank_of:
            break
    else:
        raise ConfigError(
            f"{paddle_schedule.name} has its stages on ranks where no placement has them",
            expected=f"stage s on rank s % {ranks}, or there and back again",
            got=f"the ranks of the stages, {paddle_schedule.rank_of}",
            fix="PipelineStage(layer, stage_index, num_stages, group=..) with the stages "
            "rank, rank + ranks, ..; ScheduleFThenB and Schedule1F1B take one for each rank",
        )
    expected = placement.stages_of(paddle_schedule.rank)
    if tuple(sorted(paddle_schedule.layers)) != expected:
        raise ConfigError(
            f"rank {paddle_schedule.rank} of a pipeline was given other stages than its own",
            expected=f"stages {list(expected)} of {placement.stages}",
            got=f"stages {sorted(paddle_schedule.layers)}",
            fix="give each rank the PipelineStage with its own stage_index; several to ScheduleVPP",
        )
    return placement


def _required_job() -> Job | None:
    """Returns the job that connects the ranks; None in a process that is alone.

    If the script has begun no job, this begins one, which is collective.
    """
    job = current_job()
    if job is None and meeting.world_size() > 1:
        strategy = DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": -1}
        init(is_collective=True, strategy=strategy)
        job = current_job()
    return job


def _require_equal_schedules(schedules: list[str]) -> None:
    """Raises ConfigError if ranks have different schedules."""
    for rank, schedule in enumerate(schedules):
        if schedule != schedules[0]:
            raise ConfigError(
                "the ranks of a pipeline have different schedules",
                expected=f"one schedule; rank 0 has {schedules[0].splitlines()[0]}",
                got=f"rank {rank} has {schedule.splitlines()[0]}",
                fix="make the same schedule, with n_microbatches and loss_fn, on every rank",
            )


def _run_batch(schedule: Any, data: MicroBatchData, losses: list[Tensor] | None) -> None:
    """Runs a batch of Paddle's ``schedule`` on fleetpipe's engine. Collective."""
    if schedule not in _runners:
        _runners[schedule] = _ScheduleRunner(PaddleSchedule(schedule))
    _runners[schedule].step(data, losses)


def _refuse_own_exchange(name: str) -> None:
    """Raises the error for a class of schedules that has its own code to send and receive."""
    raise ConfigError(
        f"{name} exchanges values in a way of its own, which ends after 30 s between CPUs",
        expected="ScheduleFThenB, Schedule1F1B, ScheduleVPP, or a PipelineScheduleMulti that sets "
        "pipeline_order",
        fix="set pipeline_order and leave _step_microbatches as it is; or take a PipelineLayer, "
        "whose schedule_mode may be any that fleetpipe.schedules.register was given",
    )


@contextmanager
def on_engine() -> Iterator[None]:
    """In this context, Paddle's schedules run on fleetpipe's engine if the device is a CPU."""
    if device_kind() != "cpu":
        yield
        return
    with stepping(_run_batch, _refuse_own_exchange):
        yield
