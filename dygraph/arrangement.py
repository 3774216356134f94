"""From a strategy and a number of chunks to a schedule, and so to the placement of the layers."""

from __future__ import annotations

import functools
from dataclasses import replace

from fleetpipe.config import PipelineConfig
from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import Schedule, build

_AUTO = "auto"
_DUALPIPEV = "DualPipeV"


@functools.lru_cache(maxsize=4)
def arranged(config: PipelineConfig, ranks: int, chunks: int | None) -> Schedule:
    """Builds the schedule that ``config`` asks for, verified against its memory cap.

    The layers of a model are placed as its schedule wants them, so a model and the wrapper that
    trains it both ask here.

    Args:
        config: Names the schedule and gives m and the cap.
        ranks: Ranks of the pipeline, p.
        chunks: ``num_virtual_pipeline_stages``; None for the schedule's own default.

    Raises:
        ConfigError: The schedule does not take that number of chunks or micro-batches.
        ScheduleError: It needs more memory than the cap allows.
    """
    asked: dict[str, object] = {"groups": config.groups, "warmup_slack": config.warmup_slack}
    if config.schedule == _AUTO:
        asked.update(memory_cap=config.memory_cap, costs=config.costs)
    options = {name: value for name, value in asked.items() if value is not None}
    try:
        schedule = build(
            config.schedule,
            ranks=ranks,
            micro_batches=config.micro_batches,
            chunks=chunks,
            **options,
        )
    except ScheduleError:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"schedule_mode={config.schedule!r} cannot be built for this model and batch",
            got=f"pp_degree={ranks}, num_virtual_pipeline_stages={chunks}, "
            f"accumulate_steps={config.micro_batches}",
            cause="\n    ".join(str(error).splitlines()),
            fix="leave num_virtual_pipeline_stages out for the schedule's own number of chunks, "
            "or choose another schedule",
        ) from error
    schedule.verify(memory_cap=config.memory_cap, costs=config.costs)
    return schedule


def dualpipev(config: PipelineConfig, chunks: int | None) -> PipelineConfig:
    """Returns ``config`` with the schedule that ``PipelineLayer(use_dualpipev=True)`` means.

    Raises:
        ConfigError: Another schedule or a number of chunks was asked for as well.
    """
    if config.schedule not in (PipelineConfig.schedule, _DUALPIPEV) or chunks is not None:
        raise ConfigError(
            "use_dualpipev=True names the schedule DualPipeV, with two chunks on each rank",
            got=f"schedule_mode={config.schedule!r}, num_virtual_pipeline_stages={chunks}",
            fix="leave use_dualpipev out, and choose with schedule_mode",
        )
    return replace(config, schedule=_DUALPIPEV)
