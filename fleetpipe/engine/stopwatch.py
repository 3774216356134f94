"""Times an instruction of the engine, which may be called several times until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetpipe.engine.observer import Blocked, Instruction
from fleetpipe.mesh.turns import here, stretch


class Stopwatch:
    """An instruction that is timed from its first call to the end of the last one.

    An instruction that is blocked is called again once its message is there; the time includes the
    wait, also one for several messages that was over before it was known which of them came. One
    that raises is not counted. If two instructions take turns, each has the time of its
    own turns.
    """

    __slots__ = ("_begin", "_clock", "_instruction", "_record")

    def __init__(
        self,
        instruction: Instruction,
        record: Callable[[float, float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wraps ``instruction``.

        Args:
            instruction: The instruction to time.
            record: Called with the begin and the end of each run, in seconds of the clock.
            clock: Returns the seconds.
        """
        self._instruction, self._record, self._clock = instruction, record, clock
        self._begin: float | None = None

    def __call__(self) -> Blocked | None:
        """Runs the instruction; see :data:`fleetpipe.engine.observer.Instruction`."""
        begin = self._clock() - here.idle if self._begin is None else self._begin
        self._begin = None
        blocked = self._instruction()
        if blocked is None:
            self._record(*stretch(begin, self._clock()))
        else:
            self._begin = begin
        return blocked
