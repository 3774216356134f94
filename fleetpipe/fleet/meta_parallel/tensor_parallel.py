"""``meta_parallel.tensor_parallel`` with a wrapper that also runs on CPU."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.meta_parallel import tensor_parallel as _theirs

from fleetpipe.dygraph.tensor_parallel import TensorParallel

__all__ = ["TensorParallel"]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
