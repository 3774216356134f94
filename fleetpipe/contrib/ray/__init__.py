"""Runs jobs on a Ray cluster: a trainer of Ray Train whose workers are the ranks.

Start with ``trainer.py``, which a user calls; ``backend.py`` tells each worker which rank it is.
Needs ``pip install 'fleetpipe[ray]'``; nothing of Ray or Paddle is imported before a name needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fleetpipe.extras import needed_for

if TYPE_CHECKING:
    from fleetpipe.contrib.ray.backend import PaddleConfig as PaddleConfig
    from fleetpipe.contrib.ray.checkpoints import RayCheckpointManager as RayCheckpointManager
    from fleetpipe.contrib.ray.checkpoints import ReportCallback as ReportCallback
    from fleetpipe.contrib.ray.trainer import PaddleTrainer as PaddleTrainer

#: Names that are loaded when they are used, by the module that has them.
_LATE = {
    "PaddleConfig": "fleetpipe.contrib.ray.backend",
    "PaddleTrainer": "fleetpipe.contrib.ray.trainer",
    "RayCheckpointManager": "fleetpipe.contrib.ray.checkpoints",
    "ReportCallback": "fleetpipe.contrib.ray.checkpoints",
}


def __getattr__(name: str) -> Any:
    """Loads a name that needs Ray when it is first used.

    Raises:
        AttributeError: There is no such name.
        PackageNotFound: Ray is not installed.
    """
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_for(f"fleetpipe.ray.{name}"):
        return getattr(importlib.import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted(_LATE)
