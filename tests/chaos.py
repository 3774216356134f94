"""Kills a rank before an operation of its plan."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from fleetpipe.engine.observer import BatchObserver, Blocked, Instruction, Played
from fleetpipe.schedules import Op


def kill() -> None:
    """Ends this process as the kernel does that is out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


class Struck(BatchObserver):
    """Calls ``strike`` before an operation such as ``B1.3`` or ``STEP``, in the n-th batch."""

    def __init__(self, at: str, nth: int = 1, strike: Callable[[], object] = kill) -> None:
        self._at = at
        self._left = nth
        self._strike = strike

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        if str(op) != self._at:
            return instruction

        def strike_first() -> Blocked | None:
            self._left -= 1
            if self._left == 0:
                self._strike()
            return instruction()

        return strike_first
