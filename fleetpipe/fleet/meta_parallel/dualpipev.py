"""``meta_parallel.dualpipev`` with fleetpipe's wrapper."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet import meta_parallel as _paddles

from fleetpipe.dygraph import DualPipeVParallel

__all__ = ["DualPipeVParallel"]

#: Paddle has the module since 3.3.
_theirs: Any = getattr(_paddles, "dualpipev", None)


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
