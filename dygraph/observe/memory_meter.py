"""Measures what a process takes of its device's memory beside what its tensors take."""

from __future__ import annotations

from typing import NamedTuple

from fleetpipe.engine.observer import Blocked, Instruction, Played
from fleetpipe.paddle_api.device import allocated_bytes, taken_bytes
from fleetpipe.profiling import ProcessMemory
from fleetpipe.schedules import Action, Op


class _Moment(NamedTuple):
    """Bytes of the live tensors, and of the process."""

    tensors: int
    process: int

    @classmethod
    def now(cls) -> _Moment:
        return cls(allocated_bytes(), taken_bytes())


class MemoryMeter:
    """An observer of the engine that compares both sizes after each action."""

    def __init__(self) -> None:
        """Takes the sizes before the first batch, when only the model is there."""
        self._first = _Moment.now()
        self._most = self._first

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if not isinstance(op, Action):
            return instruction

        def measured() -> Blocked | None:
            blocked = instruction()
            if blocked is None:
                now = _Moment.now()
                self._most = _Moment(*map(max, self._most, now))
            return blocked

        return measured

    def result(self) -> ProcessMemory | None:
        """Returns how the process grows with its tensors; None if the system does not say it."""
        base = self._first.process - self._first.tensors
        if self._first.process <= 0 or base < 0 or self._most.tensors <= 0:
            return None
        growth = (self._most.process - base) / self._most.tensors
        return ProcessMemory(float(base), max(growth, 1.0))
