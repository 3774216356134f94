"""``paddle.distributed.fleet.layers``, where the tensor-parallel layers and operations stand."""

from __future__ import annotations

from fleetpipe.fleet.layers import mpu

__all__ = ["mpu"]
