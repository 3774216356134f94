"""The classes of Fleet's wrappers, for users' ``isinstance``; :func:`wrap` chooses one as Fleet.

All of them run the configured schedule on the same engine.
"""

from __future__ import annotations

from fleetpipe.aliases import Optimizer, Strategy, Topology
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.optimizer.optimizer import PipelineOptimizer
from fleetpipe.dygraph.train.pipeline_parallel import PipelineParallel
from fleetpipe.dygraph.train.switches import Switches
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api.distributed import user_strategy


class NoPipelineParallel(PipelineParallel):
    """A pipeline of one rank: one process, or replicas and shards of the whole model."""

    def __init__(
        self, layers: PipelineLayer, strategy: Strategy = None, hcg: Topology = None
    ) -> None:
        """Wraps a model like :class:`PipelineParallel`; Fleet orders these arguments differently.

        Args:
            layers: The model.
            strategy: The options; None for those given to ``fleet.init``.
            hcg: Accepted as in Fleet, without effect.

        Raises:
            ConfigError: The job has several pipeline ranks, or an option is wrong.
        """
        job = current_job()
        if job is not None and job.degrees.pp > 1:
            raise ConfigError(
                "NoPipelineParallel wraps a model for a job without a pipeline",
                got=f"pp_degree={job.degrees.pp}",
                fix="leave the choice to fleet.distributed_model",
            )
        super().__init__(layers, hcg, strategy)

    def _bind(self, optimizer: Optimizer) -> None:
        """Also accepts an unwrapped optimizer, as Fleet does, if the rank has whole parameters."""
        job = self._runtime.job
        whole = job.model_parallel().ranks == job.sharding().ranks == 1
        if isinstance(optimizer, PipelineOptimizer) or not whole:
            super()._bind(optimizer)


class PipelineParallelWithInterleave(PipelineParallel):
    """A pipeline with several chunks on each rank."""

    _has_bubble_hooks = True

    def __init__(
        self, layers: PipelineLayer, hcg: Topology = None, strategy: Strategy = None
    ) -> None:
        """Wraps a model like :class:`PipelineParallel`.

        Raises:
            ConfigError: The model has one chunk on each rank, or an option is wrong.
        """
        if isinstance(layers, PipelineLayer) and layers.get_num_virtual_stages() == 1:
            raise ConfigError(
                f"{type(self).__name__} wraps a model with several chunks on each rank",
                got="num_virtual_pipeline_stages=1",
                fix="leave the choice to fleet.distributed_model",
            )
        super().__init__(layers, hcg, strategy)

    def _get_scheduler_name(self) -> str:
        """Returns the name of the class and of the schedule that runs."""
        return f"{type(self).__name__} with schedule {self.schedule.name}"


class PipelineParallelWithInterleaveFthenB(PipelineParallelWithInterleave):
    """The class for which Fleet would run all forwards first: p <= accumulate_steps < 2p."""

    _has_bubble_hooks = False


class VPPFhenBInBalancedMemory(PipelineParallelWithInterleaveFthenB):
    """The class for which Fleet has ``pp_configs.best_unbalanced_scheduler`` on."""

    _has_bubble_hooks = True


class DualPipeVParallel(PipelineParallel):
    """The class for the schedule DualPipeV: data and loss are both on rank 0."""

    schedule_name = "DualPipeV"


def wrap(layers: PipelineLayer) -> PipelineParallel:
    """Wraps a model for the current job, in the class that Fleet would choose. Collective.

    Raises:
        ConfigError: For the reasons that :class:`PipelineParallel` gives.
    """
    job, strategy = current_job(), user_strategy()
    if job is None:
        return PipelineParallel(layers)
    config, ranks = PipelineConfig.from_strategy(strategy), job.degrees.pp
    if ranks == 1:
        return NoPipelineParallel(layers, strategy)
    if layers.arrangement.schedule(config).name == DualPipeVParallel.schedule_name:
        return DualPipeVParallel(layers, job.hcg, strategy)
    if layers.get_num_virtual_stages() == 1:
        return PipelineParallel(layers, job.hcg, strategy)
    if layers.placement.name != "loop" or not ranks <= config.micro_batches < 2 * ranks:
        return PipelineParallelWithInterleave(layers, job.hcg, strategy)
    unbalanced = Switches.from_strategy(strategy, layers).best_unbalanced_scheduler
    chosen = VPPFhenBInBalancedMemory if unbalanced else PipelineParallelWithInterleaveFthenB
    return chosen(layers, job.hcg, strategy)
