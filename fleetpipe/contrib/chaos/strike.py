"""Kills or stops this process at an operation of a step, to test that its job recovers."""

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
    """A signal that a rank of a job sends itself before an operation of its plan.

    Attributes:
        number: The number of the signal.
        rank: The rank in the job.
        at: The operation of the rank's plan, such as ``B1.3`` or ``STEP``.
        every: The step of each attempt in which the signal is sent; the first is 1.
    """

    number: int
    rank: int
    at: str
    every: int

    def __str__(self) -> str:
        return f"{self.number:d} {self.rank} {self.at} {self.every}"

    @classmethod
    def parse(cls, text: str) -> Strike:
        """Reads the text form of a strike."""
        number, rank, at, every = text.split()
        return cls(int(number), int(rank), at, int(every))


class Chaos(BatchObserver):
    """Observes training batches, and sends this process the signal of a strike in one of them."""

    def __init__(self, strike: Strike, rank: int) -> None:
        """Prepares the strike; ``rank`` is this process's rank of the pipeline."""
        self._strike = strike
        self._rank = rank
        self._steps = 0

    @classmethod
    def asked_for(cls, plan: Plan, rank: int, rank_of_job: int) -> Chaos | None:
        """Returns an observer if the environment asks for a strike on this process, else None.

        Raises:
            ConfigError: The rank's plan does not contain the operation.
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
        """Sends the signal before the strike's operation; see :class:`Observer`."""
        if played.rank != self._rank or str(op) != self._strike.at:
            return instruction

        def strike_first() -> Blocked | None:
            self._steps += 1
            if self._steps == self._strike.every:
                os.kill(os.getpid(), self._strike.number)
            return instruction()

        return strike_first


def _texts(op: Op) -> list[str]:
    """Returns the texts by which a strike can name an operation; a receive has none."""
    if isinstance(op, (Action, Fused)):
        return [str(action) for action in parts(op)]
    return [] if isinstance(op, Recv) else [str(op)]
