"""Ends or stops this process at an operation of a step, as chance might: recovery is tried so."""

from __future__ import annotations

import os
from typing import NamedTuple

from fleetpipe.engine.observer import BatchObserver, Blocked, Instruction, Played
from fleetpipe.errors import ConfigError, nearest
from fleetpipe.schedules import Action, Fused, Op, Plan, Recv
from fleetpipe.schedules.action import parts

#: Has the text form of a strike, for the processes of a job.
VARIABLE = "FLEETPIPE_CHAOS"


class Strike(NamedTuple):
    """What happens to which rank, and when.

    Attributes:
        number: The signal that the rank's process sends itself.
        rank: Its rank in the job.
        at: The operation of its plan before which it does, as ``B1.3`` or ``STEP``.
        every: In which step of a life: the first is 1.
    """

    number: int
    rank: int
    at: str
    every: int

    def __str__(self) -> str:
        return f"{self.number:d} {self.rank} {self.at} {self.every}"

    @classmethod
    def parse(cls, text: str) -> Strike:
        """Reads what ``str()`` gives."""
        number, rank, at, every = text.split()
        return cls(int(number), int(rank), at, int(every))


class Chaos(BatchObserver):
    """Strikes, in this process: an observer of its training batches."""

    def __init__(self, strike: Strike, rank: int) -> None:
        """Strikes where ``strike`` says, as rank ``rank`` of the pipeline."""
        self._strike = strike
        self._rank = rank
        self._steps = 0

    @classmethod
    def asked_for(cls, plan: Plan, rank: int, rank_of_job: int) -> Chaos | None:
        """Returns what strikes this process, where the environment asks for it.

        Raises:
            ConfigError: The rank never comes to the operation.
        """
        text = os.environ.get(VARIABLE)
        strike = None if text is None else Strike.parse(text)
        if strike is None or strike.rank != rank_of_job:
            return None
        texts = [text for op in plan.ops[rank] for text in _texts(op)]
        if strike.at not in texts:
            raise ConfigError(
                f"rank {rank_of_job} never comes to {strike.at!r}",
                where=VARIABLE,
                fix=nearest(strike.at, texts),
            )
        return cls(strike, rank)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Puts the strike before its operation; see :class:`Observer`."""
        if played.rank != self._rank or str(op) != self._strike.at:
            return instruction

        def struck() -> Blocked | None:
            self._steps += 1
            if self._steps == self._strike.every:
                os.kill(os.getpid(), self._strike.number)
            return instruction()

        return struck


def _texts(op: Op) -> list[str]:
    """Returns what an operation is called; receives have no moment of their own."""
    if isinstance(op, (Action, Fused)):
        return [str(action) for action in parts(op)]
    return [] if isinstance(op, Recv) else [str(op)]
