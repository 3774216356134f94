"""Runs a script under another strategy than it asks for: other degrees, or another schedule."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from fleetpipe import fleet
from fleetpipe.errors import UsageError
from fleetpipe.paddle_api import replaced
from fleetpipe.schedules.registry import canonical_name

_SCHEDULE = "schedule"
#: Those whose product is the number of ranks.
_AXES = {"dp", "pp", "sharding", "sep", "cp", "mp"}


class Changes(NamedTuple):
    """What a way has otherwise than the script: ``pp=1,dp=2``, ``schedule=ZBH1``.

    Attributes:
        text: As the user writes it.
        degrees: By axis.
        schedule: Its name; None leaves the script's.
    """

    text: str
    degrees: Mapping[str, int]
    schedule: str | None

    @classmethod
    def of(cls, text: str) -> Changes:
        """Reads the text.

        Raises:
            ConfigError: There is no such schedule.
            UsageError: It is none.
        """
        pairs = dict(one.partition("=")[::2] for one in text.split(","))
        schedule = pairs.pop(_SCHEDULE, None)
        if not {*pairs} <= _AXES or not all(v.isdecimal() and int(v) for v in pairs.values()):
            raise UsageError(
                "--also changes degrees or the schedule",
                expected=f"{', '.join(sorted(_AXES))} with a number, or {_SCHEDULE}",
                got=repr(text),
                fix="write pp=1,dp=2 or schedule=ZBH1",
            )
        if schedule is not None:
            canonical_name(schedule)
        return cls(text, {axis: int(value) for axis, value in pairs.items()}, schedule)

    @property
    def ranks(self) -> int:
        """Processes: one plays all stages where no other axis is given."""
        return math.prod(self.degrees.values()) if {*self.degrees} - {"pp"} else 1

    def in_force(self) -> AbstractContextManager[None]:
        """Returns a context in which the script's strategies have these."""

        def change(strategy: Any) -> Any:
            if self.degrees:
                strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in self.degrees.items()}
            if self.schedule is not None:
                strategy.pipeline_configs = {"schedule_mode": self.schedule}
            return strategy

        return strategies_changed(change)


def strategies_changed(change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """While it is open, ``fleet.init`` gets ``change(strategy)`` in place of the script's."""
    begin = fleet.init

    @functools.wraps(begin)
    def init(*arguments: Any, **named: Any) -> Any:
        passed = inspect.signature(begin).bind(*arguments, **named).arguments
        strategy = passed.get("strategy")
        passed["strategy"] = change(fleet.DistributedStrategy() if strategy is None else strategy)
        return begin(**passed)

    return replaced((fleet, "init", init))
