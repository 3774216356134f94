"""``colossalai.trainer.hooks``: what a ``Trainer`` does beside training.

``base`` has the events, ``metrics`` what is counted, ``measuring`` the hooks that count, ``logs``
those that tell, ``saving`` the one that saves.
"""

from __future__ import annotations

from fleetpipe.compat.colossalai.trainer.hooks.base import BaseHook
from fleetpipe.compat.colossalai.trainer.hooks.logs import (
    LogMetricByEpochHook,
    LogMetricByStepHook,
    TensorboardHook,
)
from fleetpipe.compat.colossalai.trainer.hooks.measuring import (
    AccuracyHook,
    LossHook,
    LRSchedulerHook,
    ThroughputHook,
)
from fleetpipe.compat.colossalai.trainer.hooks.saving import SaveCheckpointHook

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
