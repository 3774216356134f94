"""Which life of a job this process belongs to.

A *life* of a job is what lies between two starts of its processes; lives count from 1. Whoever
starts them again gives each life its number; it is 0 where nobody does.
"""

from __future__ import annotations

import os

from fleetpipe.errors import ConfigError

#: Has the number of the life.
NUMBER = "FLEETPIPE_INCARNATION"


def number() -> int:
    """Returns the number of this life; 0 where nobody counts.

    Raises:
        ConfigError: The environment has something else than a number.
    """
    text = os.environ.get(NUMBER, "0")
    if not text.isdecimal():
        raise ConfigError(
            f"{NUMBER} is no number of a life",
            where="the environment",
            got=repr(text),
            fix=f"leave {NUMBER} to fleetpipe launch, or give all ranks the same whole number",
        )
    return int(text)
