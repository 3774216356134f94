"""``colossalai.trainer.hooks``: the hooks that a ``Trainer`` calls around batches and epochs.

``base`` has the events and the hooks that wrap a callback of fleetpipe's, ``measuring`` the hooks
that measure figures and log them.
"""

from __future__ import annotations

from fleetpipe.contrib.compat.colossalai.trainer.hooks.base import (
    BaseHook,
    SaveCheckpointHook,
    TensorboardHook,
)
from fleetpipe.contrib.compat.colossalai.trainer.hooks.measuring import (
    AccuracyHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LossHook,
    LRSchedulerHook,
    ThroughputHook,
)

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LossHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
]
