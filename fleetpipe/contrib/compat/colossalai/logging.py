"""``get_dist_logger``: a logger that writes on chosen ranks only."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection

from fleetpipe.job import meeting


class DistributedLogger:
    """Python's logger, whose methods take the ranks that write a message."""

    def __init__(self, name: str) -> None:
        """Takes the logger of that name, which writes to stderr unless it is set up otherwise."""
        self._logger = logging.getLogger(name)
        if not self._logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
            self._logger.addHandler(handler)
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False

    def info(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Writes a message on ``ranks`` of the job, by default on all."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Writes a warning on ``ranks`` of the job, by default on all."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Writes an error on ``ranks`` of the job, by default on all."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: str, ranks: Collection[int] | None) -> None:
        if ranks is None or meeting.own_rank() in ranks:
            self._logger.log(level, message)


@functools.cache
def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """Returns the logger of a name."""
    return DistributedLogger(name)


def disable_existing_loggers(exclude: Collection[str] = ("colossalai",)) -> None:
    """Makes all loggers except ``exclude`` write warnings and errors only."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] not in exclude:
            logger.setLevel(logging.WARNING)
