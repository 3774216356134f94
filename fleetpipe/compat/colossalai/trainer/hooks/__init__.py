"""``colossalai.trainer.hooks``: what a ``Trainer`` does beside training.

``base`` has the events, ``metrics`` what is counted, ``measuring`` the hooks that count, ``logs``
those that show it, ``callback_hooks`` those that are a callback of fleetpipe's.
"""

from __future__ import annotations

from fleetpipe.compat.colossalai.trainer.hooks.base import BaseHook
from fleetpipe.compat.colossalai.trainer.hooks.callback_hooks import (
    SaveCheckpointHook,
    TensorboardHook,
)
from fleetpipe.compat.colossalai.trainer.hooks.logs import LogMetricByEpochHook, LogMetricByStepHook
from fleetpipe.compat.colossalai.trainer.hooks.measuring import (
    AccuracyHook,
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
