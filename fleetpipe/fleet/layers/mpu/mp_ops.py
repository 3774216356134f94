"""``mpu.mp_ops`` with operations that run on CPU in the place of Paddle's."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.layers.mpu import mp_ops as _theirs

from fleetpipe.dygraph.tensor_parallel import OPERATIONS

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Returns the operation that runs here, else Paddle's object of that name."""
    return OPERATIONS[name] if name in OPERATIONS else getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *OPERATIONS, *dir(_theirs)})
