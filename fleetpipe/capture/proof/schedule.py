"""Chooses the schedule of a proof: the one that the strategy of the job asks for."""

from __future__ import annotations

from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.model.arrangement import Arrangement
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.topology import user_strategy
from fleetpipe.profiling import PipelinePlan
from fleetpipe.schedules import Schedule

#: Most micro-batches of a step, where a batch has more: enough for every phase of a schedule.
MOST = 8


def planned_schedule(
    ranks: int, chunks: int | None, plan: PipelinePlan | None, stages: int
) -> Schedule | None:
    """Returns the schedule that will train a model, for at most about ``MOST`` micro-batches.

    Args:
        ranks: Ranks of the pipeline.
        chunks: Chunks on each rank; None takes the schedule's own number.
        plan: The plan that the cut comes from; None if there is none.
        stages: The number of stages of the cut.

    Returns:
        None if it cuts sequences, or places another number of stages, which is refused later.

    Raises:
        ConfigError: The strategy asks for no schedule that can be built.
        ScheduleError: It passes the memory cap.
    """
    config = PipelineConfig.from_strategy(user_strategy())
    arrangement = Arrangement(ranks, chunks, use_dualpipev=False, plan=plan)
    schedule = None
    for count in range(min(MOST, config.micro_batches), config.micro_batches + 1):
        try:
            schedule = arrangement.schedule(config.resized(count, config.micro_batch_size))
            break
        except ConfigError:
            # Some schedules want a multiple of the ranks.
            if count == config.micro_batches:
                raise
    fits = schedule is not None and schedule.slices == 1 and schedule.placement.stages == stages
    return schedule if fits else None
