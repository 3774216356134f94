"""Assigns stages of a list of layers to ranks, cuts the list, and builds schedules for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fleetpipe.aliases import Topology
from fleetpipe.config import PipelineConfig
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.job import meeting
from fleetpipe.job.job import Job, current_job
from fleetpipe.mesh.axes import Degrees
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.distributed import fleet_has_begun, user_strategy
from fleetpipe.partition import LayerInfo, Partition, segment
from fleetpipe.schedules import Placement, Schedule

_DUALPIPEV = "DualPipeV"


class LayerPlan(Protocol):
    """The used members of :class:`fleetpipe.profiling.PipelinePlan`, a plan for the layers."""

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""

    @property
    def chunks(self) -> int:
        """The number of chunks on each rank."""

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a batch, m."""

    @property
    def schedule(self) -> Schedule:
        """The schedule to run."""

    @property
    def recompute(self) -> Sequence[Sequence[int]]:
        """For each stage, the numbers of the layers whose forward runs again in backward."""

    @property
    def partition(self) -> Partition:
        """The cut of the layers into stages."""

    def schedule_for(self, micro_batches: int) -> Schedule:
        """Returns the schedule for another number of micro-batches."""

    def require_degrees(self, degrees: Degrees) -> None:
        """Refuses a job with other degrees."""

    def require_layers(self, names: Sequence[str]) -> None:
        """Refuses a model with other layers than the plan's."""


class Arrangement:
    """The placement of a list of layers on ranks, and the schedules that can run it.

    Attributes:
        placement: The rank of each stage, which never changes.
    """

    def __init__(
        self,
        ranks: int,
        chunks: int | None,
        use_dualpipev: bool,
        plan: LayerPlan | None = None,
        head: bool = False,
    ) -> None:
        """Places the stages for the schedule of the current job.

        Args:
            ranks: The number of ranks of the pipeline.
            chunks: The number of chunks on each rank; None for the schedule's own number.
            use_dualpipev: Whether the schedule is DualPipeV.
            plan: The plan that has the schedule; None without a plan.
            head: Whether the last layers are the parts of a vocabulary head, one on each rank.

        Raises:
            ConfigError: The schedule does not allow that number of chunks, or the plan is for other
                numbers.
        """
        self._ranks = ranks
        # In Fleet, use_dualpipev goes with one chunk or no number, and means two chunks.
        self._chunks = None if use_dualpipev and chunks in (1, 2) else chunks
        self._use_dualpipev = use_dualpipev
        self._plan = plan
        self._has_head = head
        config = PipelineConfig()  # the defaults, if there is no job
        job = current_job()
        if job is not None:
            config = PipelineConfig.from_strategy(user_strategy())
            if plan is not None:
                plan.require_degrees(job.degrees)
            if plan is not None and config.micro_batches != plan.micro_batches:
                raise ConfigError(
                    "the plan is for another number of micro-batches than the strategy",
                    expected=f"accumulate_steps={plan.micro_batches}, as in the plan",
                    got=f"accumulate_steps={config.micro_batches}",
                    fix='set strategy.pipeline_configs = {"accumulate_steps": plan.micro_batches}, '
                    "or plan for that many",
                )
        self.placement = self._schedule(config).placement

    def schedule(self, config: PipelineConfig) -> Schedule:
        """Returns the schedule that ``config`` selects, verified against its memory limit.

        Raises:
            ConfigError: The schedule needs another placement, or cannot be built.
            ScheduleError: The schedule needs more memory than the option ``memory_cap`` allows.
        """
        job = current_job()
        if job is not None and job.degrees.pp != self._ranks:
            raise ConfigError(
                "this PipelineLayer has another number of stages than the job",
                expected=f"pp_degree={job.degrees.pp}",
                got=f"{self._ranks}: the whole model is in this process",
                fix="pass topology=fleet.get_hybrid_communicate_group().topology()",
            )
        schedule = self._schedule(config)
        if schedule.placement != self.placement:
            raise ConfigError(
                f"the schedule {schedule.name} does not run on layers placed like these",
                expected=_describe_placement(schedule.placement),
                got=_describe_placement(self.placement),
                cause="the strategy was another when the PipelineLayer was built",
                fix="set schedule_mode, and call fleet.init, before you build the PipelineLayer",
            )
        return schedule

    def _schedule(self, config: PipelineConfig) -> Schedule:
        """Builds the schedule that a strategy's options name, or takes that of the user's plan."""
        if self._plan is not None:
            return self._schedule_of_plan(self._plan, config)
        if self._use_dualpipev:
            config = _with_dualpipev(config, self._chunks)
        return config.schedule_for(self._ranks, self._chunks, head=self._has_head)

    def _schedule_of_plan(self, plan: LayerPlan, config: PipelineConfig) -> Schedule:
        """Returns a plan's schedule for the number of micro-batches in ``config``.

        It refuses other ranks, chunks or schedules than the plan's in the user's arguments and in
        ``config``, the options of the job's strategy.
        """
        planned = plan.schedule
        names = (PipelineConfig.schedule, planned.name)
        same_schedule = config.schedule in names and not self._use_dualpipev
        same_schedule = same_schedule and config.slice_count in (None, planned.slices)
        same_ranks = self._ranks == plan.ranks and self._chunks in (None, plan.chunks)
        if not (same_ranks and same_schedule):
            raise ConfigError(
                "the plan says how the layers are placed, and which schedule runs",
                expected=f"{plan.ranks} ranks, {plan.chunks} chunks on each, {planned.name}, "
                f"slices={planned.slices}",
                got=f"{self._ranks} ranks, num_virtual_pipeline_stages={self._chunks}, "
                f"schedule_mode={config.schedule!r}, use_dualpipev={self._use_dualpipev}, "
                f"slices={config.slices}",
                fix="set pp_degree to plan.ranks and leave the others out, or plan anew",
            )
        schedule = plan.schedule_for(config.micro_batches)
        if config.memory_cap is not None:
            # The limit of the strategy, in bytes if the strategy's costs have bytes. The schedule
            # has been checked against the limit of the plan.
            schedule.verify(memory_cap=config.memory_cap, costs=config.costs)
        return schedule


def _with_dualpipev(config: PipelineConfig, chunks: int | None) -> PipelineConfig:
    """Returns a strategy's options with the schedule DualPipeV, as ``use_dualpipev=True`` asks."""
    if config.schedule not in (PipelineConfig.schedule, _DUALPIPEV) or chunks is not None:
        raise ConfigError(
            "use_dualpipev=True names the schedule DualPipeV, with two chunks on each rank",
            got=f"schedule_mode={config.schedule!r}, num_virtual_pipeline_stages={chunks}",
            fix="leave use_dualpipev out, and choose with schedule_mode",
        )
    return replace(config, schedule=_DUALPIPEV)


def _describe_placement(placement: Placement) -> str:
    """Returns the shape, the ranks and the chunks of a placement, for messages."""
    return f"a {placement.name} of {placement.ranks} ranks with {placement.chunks} chunks on each"


def number_of_stages(num_stages: int | None, topology: Topology, job: Job | None) -> int:
    """Returns the number of pipeline ranks, checked against the topology and the job.

    A model of one stage may be built within any job: each process then has the whole model.

    Raises:
        ConfigError: The number is missing, or the arguments and the job give different numbers.
        StateError: There are several processes, and ``fleet.init`` was not called.
    """
    if topology is None and num_stages is None:
        raise ConfigError(
            "PipelineLayer needs num_stages or topology",
            fix="pass topology=fleet.get_hybrid_communicate_group().topology()",
        )
    if job is not None and num_stages is not None and num_stages == job.degrees.asked_pp:
        num_stages = job.degrees.pp  # after a restart the job may have fewer ranks
    sources = {
        "num_stages": num_stages,
        "topology": None if topology is None else topology.get_dim("pipe"),
    }
    numbers = {name: int(value) for name, value in sources.items() if value is not None}
    if job is not None and set(numbers.values()) != {1}:
        numbers["pp_degree of fleet.init"] = job.degrees.pp
    if len(set(numbers.values())) > 1:
        without_degrees = job is not None and job.degrees.pp == 1
        raise ConfigError(
            "the number of pipeline stages is given twice, and differs",
            got=", ".join(f"{name}={value}" for name, value in numbers.items()),
            cause="fleet.init was given no strategy, or one whose hybrid_configs were set later"
            if without_degrees
            else None,
            fix="set strategy.hybrid_configs = {'pp_degree': ..}, then call "
            "fleet.init(is_collective=True, strategy=strategy)"
            if without_degrees
            else "pass only topology=fleet.get_hybrid_communicate_group().topology()",
        )
    stages = next(iter(numbers.values()))
    processes = meeting.world_size()
    if job is None and stages > 1 and processes > 1:
        stock = fleet_has_begun()
        raise StateError(
            f"a PipelineLayer of {stages} stages was built before fleet.init",
            got=f"a job of {processes} processes, none of which knows its stage",
            cause="fleet.init was that of paddle.distributed.fleet" if stock else None,
            fix="from fleetpipe import fleet, for fleet.init too"
            if stock
            else "call fleet.init(is_collective=True, strategy=strategy) first",
        )
    return stages


def choose_topology(topology: Topology, stages: int, job: Job | None) -> Topology:
    """Returns the topology of ranks for a model: the user's, the job's, or a new one.

    Args:
        topology: The argument of ``PipelineLayer``; None if there is none.
        stages: The number of pipeline ranks.
        job: The current job.
    """
    if topology is not None:
        return topology
    if job is not None and job.degrees.pp == stages:
        return job.hcg.topology()
    replicas = max(1, paddle.distributed.get_world_size() // stages)
    return paddle_fleet.CommunicateTopology(["data", "pipe", "model"], [replicas, stages, 1])


def cut(
    layers: Sequence[LayerInfo], placement: Placement, method: str | Sequence[int]
) -> Partition:
    """Cuts a list of layers into the stages of a placement.

    Each part of a vocabulary head is a stage of its own, and so is the loss after the head.

    Args:
        layers: The list of layers.
        placement: The rank of each stage.
        method: The option ``seg_method`` of ``PipelineLayer``.

    Raises:
        PartitionError: The method cannot cut these layers.
    """
    head = placement.stages - placement.body
    body = segment(layers[: len(layers) - head], placement.body, method)
    ends = range(body.boundaries[-1] + 1, len(layers) + 1)
    return Partition((*body.boundaries, *ends), body.method, tuple(layers))


def own_stages(placement: Placement, job: Job | None) -> tuple[int, tuple[int, ...]]:
    """Returns this process's rank in the pipeline and the stages that it owns."""
    if job is None or job.local:
        return 0, tuple(range(placement.stages))
    rank = job.hcg.get_stage_id()
    return rank, placement.stages_of(rank)
