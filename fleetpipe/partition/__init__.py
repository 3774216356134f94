"""Where to cut a list of layers into stages; pure Python, no Paddle needed."""

from __future__ import annotations

from fleetpipe.partition.cuts import by_class, explicit, uniform
from fleetpipe.partition.layers import LayerInfo, Partition, StageRange, segment
from fleetpipe.partition.slowest import Bottleneck, balanced, fastest

__all__ = [
    "segment",
    "uniform",
    "by_class",
    "explicit",
    "balanced",
    "fastest",
    "Bottleneck",
    "LayerInfo",
    "Partition",
    "StageRange",
]
