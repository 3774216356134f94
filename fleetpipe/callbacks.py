"""Names the callbacks for :class:`fleetpipe.Model`; those of ``paddle.callbacks`` work too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetpipe.extras import late
from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint
from fleetpipe.fit.callbacks.metrics import MetricsLogger, ThroughputMonitor, TraceSteps
from fleetpipe.fit.callbacks.progress import Progress

if TYPE_CHECKING:
    from fleetpipe.contrib.callbacks import LogMetricByEpoch as LogMetricByEpoch
    from fleetpipe.contrib.callbacks import LossMonitor as LossMonitor
    from fleetpipe.contrib.generation import LogSamples as LogSamples

#: The module of each callback that is loaded when it is first used.
_LATE = {
    "LogMetricByEpoch": "fleetpipe.contrib.callbacks",
    "LogSamples": "fleetpipe.contrib.generation",
    "LossMonitor": "fleetpipe.contrib.callbacks",
}

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
    __getattr__ = late(_LATE)
