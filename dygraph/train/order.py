"""``fleetpipe_configs["order"]``: whether a rank may run the first ready action of its row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from fleetpipe import log
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.model.hidden_uses import reachable
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.random_keys import FLEET
from fleetpipe.engine.engine import Walker
from fleetpipe.engine.ready import ReadyWalker
from fleetpipe.errors import ConfigError
from fleetpipe.job.job import Job
from fleetpipe.mesh.axes import SEQUENCE, SHARDS
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.check.envelope import Envelope, without_fusion

_log = log.logger(__name__)


def as_hint(
    schedule: Schedule, config: PipelineConfig, job: Job, layers: PipelineLayer, exchanges: bool
) -> Schedule:
    """Returns the schedule in the form that ranks may reorder; unchanged if they keep its order.

    Args:
        schedule: The schedule of the options.
        config: The options.
        job: The job.
        layers: The model.
        exchanges: Whether layers of this process exchange values with others in an action.

    Raises:
        ConfigError: An option, or a layer, needs the order of the schedule.
    """
    if _is_hint(config, job):
        _require_free(config, job, layers, exchanges)
        return without_fusion(schedule)
    if config.order == "ready" and job.degrees.pp > 1:
        _log.info("order='ready' changes nothing where one process plays all ranks, in one order")
    return schedule


def walker_of(
    schedule: Schedule, config: PipelineConfig, job: Job, layers: PipelineLayer
) -> Callable[..., Walker]:
    """Returns the function that makes the walker of this process's rank."""
    if _is_hint(config, job):
        return functools.partial(ReadyWalker, _Envelopes(schedule, config, job, layers))
    return Walker


def _is_hint(config: PipelineConfig, job: Job) -> bool:
    """Whether the order of a schedule is a hint to ranks that may reorder it."""
    return config.order == "ready" and job.degrees.pp > 1 and not job.local


class _Envelopes:
    """Says for each batch what this process's rank may run early, from its current layers."""

    def __init__(
        self, schedule: Schedule, config: PipelineConfig, job: Job, layers: PipelineLayer
    ) -> None:
        (self._rank,) = job.connect()
        self._schedule, self._layers = schedule, layers
        self._cap, self._costs = config.memory_cap, config.costs
        if schedule.slices > 1 and self._costs is not None and self._costs.bytes is not None:
            # What slices hold in bytes is known to a search alone: as much as its row then.
            self._cap = self._costs = None
        self._version: int | None = None
        self._envelope: Envelope | None = None

    def __call__(self) -> Envelope:
        """Returns the envelope of a new batch: the actions that may run early."""
        if self._envelope is None or self._version != self._layers.version:
            self._version = self._layers.version
            edges, shared = self._layers.owned_stages.edges(training=True), self._shares()
            self._envelope = Envelope(
                self._schedule, self._rank, edges, self._cap, self._costs, shared
            )
        self._envelope.restart()
        return self._envelope

    def _shares(self) -> bool:
        """Whether two stages of the rank can reach one tensor, even outside of the layer list."""
        placement, owned = self._schedule.placement, self._layers.owned_stages
        stages = placement.stages_of(self._rank)
        if len(stages) == 1:
            return False
        of_entries, range_of = owned.tensors(), self._layers.partition.range_of
        within: list[set[int]] = []
        for stage in stages:
            roots: list[object] = [*owned.layers(stage).values()]
            if stage == placement.stages - 1:
                roots += self._layers.loss_functions()
            tensors = [
                tensor for number in range_of(stage) for tensor in of_entries.get(number, ())
            ]
            reached = reachable([*roots, *tensors]).values()
            within.append({id(one) for one in reached if isinstance(one, paddle.Tensor)})
        return any(one & other for one, other in itertools.combinations(within, 2))


def _require_free(config: PipelineConfig, job: Job, layers: PipelineLayer, exchanges: bool) -> None:
    """Refuses options and layers that need the order of the schedule."""
    together = [axis for axis in (*SHARDS, *SEQUENCE, "ep") if getattr(job.degrees, axis) > 1]
    synced = any(isinstance(one, paddle.nn.SyncBatchNorm) for one in layers.sublayers())
    reason = fix = ""
    if together:
        reason = f"ranks along {', '.join(together)} compute each action together"
        fix = "set the degrees of these axes to 1"
    elif exchanges or (synced and job.copies().ranks > 1):
        reason = "replicas exchange values in an action: experts that they share, or SyncBatchNorm"
        fix = "use layers that each replica computes alone"
    elif not all(hasattr(one, "await_any") for one in job.connect().values()):
        reason = "Paddle's process groups hand values over in the order of their sends"
        fix = "set strategy.fleetpipe_configs = {'transport': 'sockets'} too"
    elif config.rng == FLEET:
        reason = "layers draw random numbers from one generator in the order in which they run"
        fix = "leave rng='fleet' out"
    if reason:
        raise ConfigError(
            "order='ready' cannot be had here",
            where="strategy.fleetpipe_configs",
            cause=reason,
            fix=f"{fix}; or leave order out",
        )
