"""Runs a script in one of the ways of ``fleetpipe parity --whole``, in this process or on ranks."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fleetpipe import fleet as our_fleet
from fleetpipe.compare.recorder import recording
from fleetpipe.errors import UsageError
from fleetpipe.launch import script
from fleetpipe.launch.substitution import in_place_of_paddles
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


def run(options: argparse.Namespace) -> int:
    """Runs the script and records its trail.

    Returns:
        The exit code of the script, or of the first rank that failed.
    """
    if script.to_be_launched(options):
        words = [
            word
            for name in ("record", "steps", "stop_after", "set")
            for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
            if getattr(options, name) is not None
        ]
        return script.launch(options, "parity", *words)
    steps, stop = options.steps, options.stop_after
    with (
        in_place_of_paddles(),
        replaced((our_fleet, "init", _init(options.set))),
        recording(options.record, steps, stop),
    ):
        return script.execute_to_the_end(options.script, options.arguments)


def _init(text: str | None) -> Any:
    """Returns ``fleet.init`` with changes in the strategy."""
    begin = our_fleet.init
    if text is None:
        return begin
    changes = Changes.of(text)

    @functools.wraps(begin)
    def init(
        role_maker: Any = None,
        is_collective: bool = False,
        strategy: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        strategy = our_fleet.DistributedStrategy() if strategy is None else strategy
        degrees = {f"{axis}_degree": degree for axis, degree in changes.degrees.items()}
        if degrees:
            strategy.hybrid_configs = degrees
        if changes.schedule is not None:
            strategy.pipeline_configs = {"schedule_mode": changes.schedule}
        return begin(role_maker, is_collective, strategy, *more, **named)

    return init
