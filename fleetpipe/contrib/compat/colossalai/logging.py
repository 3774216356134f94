"""``get_dist_logger``: a logger that writes on chosen ranks only."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection
from typing import Any

from fleetpipe.job import meeting


# Python 3.10's LoggerAdapter takes no parameter.
class DistributedLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Python's logger, whose methods take the ``ranks`` of the job that write; all by default."""

    def log(  # type: ignore[override]  # which takes no ranks
        self, level: int, msg: object, *args: Any, ranks: Collection[int] | None = None, **how: Any
    ) -> None:
        """Writes a message; ``info``, ``warning`` and the other methods call this."""
        if ranks is None or meeting.own_rank() in ranks:
            super().log(level, msg, *args, **how)


@functools.cache
def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """Returns the logger of a name, which writes to stderr unless it is set up otherwise."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return DistributedLogger(logger, {})


def disable_existing_loggers(exclude: Collection[str] = ("colossalai",)) -> None:
    """Makes all loggers except ``exclude`` write warnings and errors only."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] not in exclude:
            logger.setLevel(logging.WARNING)
