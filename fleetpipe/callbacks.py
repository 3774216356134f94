"""Callbacks for :class:`fleetpipe.Model`; those of ``paddle.callbacks`` work too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetpipe.extras import late
from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint
from fleetpipe.fit.callbacks.metrics_logger import MetricsLogger
from fleetpipe.fit.callbacks.progress import Progress
from fleetpipe.fit.callbacks.throughput import ThroughputMonitor
from fleetpipe.fit.callbacks.trace_steps import TraceSteps

if TYPE_CHECKING:
    from fleetpipe.contrib.callbacks.log_by_epoch import LogMetricByEpoch as LogMetricByEpoch
    from fleetpipe.contrib.callbacks.loss_monitor import LossMonitor as LossMonitor
    from fleetpipe.contrib.generation.log_samples import LogSamples as LogSamples

__all__ = [
    "LogMetricByEpoch",
    "LogSamples",
    "LossMonitor",
    "MetricsLogger",
    "PipelineCheckpoint",
    "Progress",
    "ThroughputMonitor",
    "TraceSteps",
]

if not TYPE_CHECKING:  # to a type checker it would give the module every name
    __getattr__ = late(
        {
            "LogMetricByEpoch": "fleetpipe.contrib.callbacks.log_by_epoch",
            "LogSamples": "fleetpipe.contrib.generation.log_samples",
            "LossMonitor": "fleetpipe.contrib.callbacks.loss_monitor",
        }
    )
