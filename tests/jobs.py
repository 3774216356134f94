"""Jobs for tests: one builder of strategies, and of jobs that begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fleetpipe import fleet
from fleetpipe.job.job import current_job

#: Rows of a micro-batch.
ROWS = 2


def strategy(
    micro_batches: int = 4,
    schedule: str = "1F1B",
    *,
    rows: int = ROWS,
    order: Sequence[str] = (),
    own: Mapping[str, Any] | None = None,
    sharding_stage: int = 1,
    **degrees: int,
) -> Any:
    """Builds a strategy.

    Args:
        micro_batches: Micro-batches of a batch.
        schedule: The schedule's name.
        rows: Rows of a micro-batch.
        order: The axes that come first in the order of the axes; the others follow as usual.
        own: fleetpipe's own options.
        sharding_stage: What the ranks along sharding share.
        degrees: By axis; the others are Fleet's defaults.
    """
    made = fleet.DistributedStrategy()
    configs: dict[str, Any] = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    if order:
        others = [axis for axis in made.hybrid_parallel_order if axis not in order]
        configs["order"] = [*order, *others]
    made.hybrid_configs = configs
    made.pipeline_configs = {
        "accumulate_steps": micro_batches,
        "micro_batch_size": rows,
        "schedule_mode": schedule,
    }
    made.fleetpipe_configs = dict(own or {})
    made.sharding = sharding_stage > 1
    made.sharding_configs = {"stage": sharding_stage}
    return made


def begin(
    pp: int = 1,
    micro_batches: int = 4,
    schedule: str = "1F1B",
    *,
    dp: int = 1,
    mp: int = 1,
    sharding: int = 1,
    rows: int = ROWS,
    axes: Sequence[str] = (),
    sharding_stage: int = 1,
    **own: Any,
) -> Any:
    """Begins a job on all ranks, or on the one process that plays them; returns it.

    The arguments are those of `strategy`, whose order is ``axes`` here; ``own`` are fleetpipe's own
    options.
    """
    degrees = {"dp": dp, "mp": mp, "pp": pp, "sharding": sharding}
    degrees["sharding_stage"] = sharding_stage
    chosen = strategy(micro_batches, schedule, rows=rows, order=axes, own=own, **degrees)
    fleet.init(is_collective=True, strategy=chosen)
    return current_job()


@contextmanager
def begun(strategy: Any = None) -> Iterator[Any]:
    """Within it there is a job of a strategy."""
    fleet.init(is_collective=True, strategy=strategy)
    try:
        yield current_job()
    finally:
        fleet.shutdown()


@contextmanager
def job(*args: Any, **options: Any) -> Iterator[Any]:
    """Begins a job by `begin`, and ends it."""
    running = begin(*args, **options)
    try:
        yield running
    finally:
        fleet.shutdown()
