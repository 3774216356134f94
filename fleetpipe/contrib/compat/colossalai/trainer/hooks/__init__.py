"""``colossalai.trainer.hooks``: what a ``Trainer`` does beside training.

``base`` has the events and the hooks that are a callback of fleetpipe's, ``measuring`` those that
count and show.
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
