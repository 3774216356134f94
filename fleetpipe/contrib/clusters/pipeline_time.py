"""The time of a pipeline from the schedules' own simulator, extrapolated for long batches.

After some micro-batches a schedule repeats: each further one takes as long as the last. So a long
batch is extrapolated from two shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fleetpipe.errors import ConfigError
from fleetpipe.profiling.cost_model import StageCost, costs_of
from fleetpipe.schedules import Schedule, build
from fleetpipe.schedules.action import flatten
from fleetpipe.schedules.simulation.replay import replay

#: Actions beyond which a batch is carried on, not played.
_MOST_PLAYED = 20_000


#: By stage, how many forwards a rank holds whose B or I is to come, and whose W is to come.
HeldStages = tuple[dict[int, int], dict[int, int]]


@lru_cache(maxsize=256)
def cached_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Builds a schedule and caches it, as layouts with many degrees share it.

    Raises:
        ConfigError: The schedule does not take these sizes.
    """
    return build(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks)


def small(name: str, chunks: int) -> Schedule:
    """Returns a schedule on two ranks, from which its properties on more ranks are read.

    Raises:
        ConfigError: The schedule does not take so many chunks.
    """
    return cached_schedule(name, 2, 4, chunks)


def pipeline_time(
    name: str, ranks: int, chunks: int, micro_batches: int, stages: Sequence[StageCost], comm: float
) -> tuple[float, float]:
    """Returns the time of a batch, and the computing time of the busiest rank.

    Args:
        name: The schedule's name.
        ranks: Ranks of the pipeline.
        chunks: Chunks on each rank.
        micro_batches: Micro-batches of a batch.
        stages: The costs of the stages, with the transfers that keep ranks busy.
        comm: Seconds of latency of a value between stages.

    Raises:
        ConfigError: The schedule does not take these numbers.
    """
    actions = 2 * len(stages) * micro_batches
    period = _period(ranks, micro_batches)
    first = 2 * period + micro_batches % period
    if actions <= _MOST_PLAYED or micro_batches <= first + period:
        return _play(name, ranks, chunks, micro_batches, stages, comm)
    shorter = _play(name, ranks, chunks, first, stages, comm)
    longer = _play(name, ranks, chunks, first + period, stages, comm)
    rounds = (micro_batches - first) / period
    seconds, busy = (low + rounds * (high - low) for low, high in zip(shorter, longer))
    return seconds, busy


def _period(ranks: int, micro_batches: int) -> int:
    """Returns after how many micro-batches a schedule repeats: p for interleaved ones."""
    return max(ranks, 4) if micro_batches >= ranks else micro_batches


def _play(
    name: str, ranks: int, chunks: int, micro_batches: int, stages: Sequence[StageCost], comm: float
) -> tuple[float, float]:
    schedule = cached_schedule(name, ranks, micro_batches, chunks)
    times = replay(schedule, None, costs_of(stages, comm))
    return max(ends[-1] for ends in times.ends), max(times.busy)


@lru_cache(maxsize=256)
def most_held(
    name: str, ranks: int, chunks: int, micro_batches: int
) -> tuple[HeldStages, ...] | None:
    """Returns for each rank the most activations that it holds, with all stages alike.

    The amount does not grow once the pipeline is full, so that twice its length is simulated at
    most. None if the schedule does not take these numbers.
    """
    enough = min(micro_batches, 2 * _period(ranks, micro_batches))
    try:
        held = _most_of_ranks(cached_schedule(name, ranks, enough, chunks))
        if any(enough in forwards.values() for forwards, _ in held):
            # A stage that holds all of these may hold all of more.
            held = _most_of_ranks(cached_schedule(name, ranks, micro_batches, chunks))
    except ConfigError:
        return None
    return held


def _most_of_ranks(schedule: Schedule) -> tuple[HeldStages, ...]:
    return tuple(_most_of(schedule, rank) for rank in range(len(schedule.actions)))


def _most_of(schedule: Schedule, rank: int) -> HeldStages:
    whole = dict.fromkeys(schedule.placement.stages_of(rank), 0)
    waiting = dict(whole)
    most, best = -1, (whole, waiting)
    for kind, stage, _ in flatten(schedule.actions[rank]):
        whole[stage] += kind == "F"
        total = sum(whole.values()) + sum(waiting.values())
        if total > most:
            most = total
            best = {**whole}, {**waiting}
        whole[stage] -= kind in "BI"
        waiting[stage] += (kind == "I") - (kind == "W")
    return best
