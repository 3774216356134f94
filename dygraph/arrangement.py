"""The schedule that ``PipelineLayer(use_dualpipev=True)`` means."""

from __future__ import annotations

from dataclasses import replace

from fleetpipe.config import PipelineConfig
from fleetpipe.errors import ConfigError

_DUALPIPEV = "DualPipeV"


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
