"""Hides lines of Paddle's and fleetpipe's logs below a level in a command's output."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fleetpipe.log import FLEETS_LOGGER, NAME

#: The levels, with the number that Paddle's C++ parts know each by.
LEVELS = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "ERROR": 2}
DEFAULT_LEVEL = "WARNING"

#: What is left out of the warnings of Paddle's launcher too, as in :mod:`fleetpipe` itself.
_CCACHE = "No ccache found"


def environment(level: str) -> dict[str, str]:
    """Returns the environment of a process that hides lines of Paddle's below ``level``.

    It does not affect the lines that Fleet logs in Python: see :func:`quiet`.
    """
    if LEVELS[level] == 0:
        return dict(os.environ)
    warnings_shown = [os.environ.get("PYTHONWARNINGS"), f"ignore:{_CCACHE}"]
    return {
        "GLOG_minloglevel": str(LEVELS[level]),
        **os.environ,  # what the user set goes first
        "PYTHONWARNINGS": ",".join(filter(None, warnings_shown)),
    }


@contextmanager
def quiet(level: str) -> Iterator[None]:
    """While it is open, Paddle's lines below ``level`` are hidden. Import Paddle within it.

    A level other than the default stays fleetpipe's until the process ends.
    """
    if level != DEFAULT_LEVEL:
        logging.getLogger(NAME).setLevel(level)
    if LEVELS[level] == 0:
        yield
        return

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= least

    # A filter: `fleet.init` sets the level itself.
    least: int = getattr(logging, level)
    logger, before = logging.getLogger(FLEETS_LOGGER), dict(os.environ)
    logger.addFilter(is_shown)
    os.environ.update(environment(level))
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
        for name in ("GLOG_minloglevel", "PYTHONWARNINGS"):
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})
