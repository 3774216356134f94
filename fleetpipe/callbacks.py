"""Callbacks for :class:`fleetpipe.Model`, beside those of ``paddle.callbacks``, which work too."""

from __future__ import annotations

from fleetpipe.contrib.callbacks.log_by_epoch import LogMetricByEpoch
from fleetpipe.contrib.callbacks.loss_monitor import LossMonitor
from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint
from fleetpipe.fit.callbacks.metrics_logger import MetricsLogger
from fleetpipe.fit.callbacks.progress import Progress
from fleetpipe.fit.callbacks.throughput import ThroughputMonitor
from fleetpipe.fit.callbacks.trace_steps import TraceSteps

__all__ = [
    "LogMetricByEpoch",
    "LossMonitor",
    "MetricsLogger",
    "PipelineCheckpoint",
    "Progress",
    "ThroughputMonitor",
    "TraceSteps",
]
