"""Adds up what actions, transfers and releases take, for as long as they keep their rank busy."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Callable

from fleetpipe.engine.observer import Instruction, Played
from fleetpipe.engine.stopwatch import Stopwatch
from fleetpipe.schedules import Action, Free, Op, Recv, Send

#: A kind of action, "S" for sends or "R" for receives; the global stage that does it; and the slice
#: of the sequences, 0 where these are whole.
Doing = tuple[str, int, int]


class ActionMeter:
    """An observer of the engine: seconds of each kind of work of a stage and slice, by batch.

    A release counts with the last action of its stage. A receive counts without its wait.
    """

    def __init__(
        self, last: str, clock: Callable[[], float] = time.perf_counter, slices: int = 1
    ) -> None:
        """Begins before a first batch.

        Args:
            last: The kind of action after which a stage releases a micro-batch: B, or W.
            clock: Measures actions, in seconds.
            slices: Slices of a micro-batch.
        """
        self._last, self._clock, self._slices = last, clock, slices
        self._now: defaultdict[Doing, float] = defaultdict(float)
        self._batches: defaultdict[Doing, list[float]] = defaultdict(list)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if isinstance(op, Action):
            kind, stage = op.kind, op.stage
        elif isinstance(op, Free):
            kind, stage = self._last, op.stage
        elif isinstance(op, Send):
            kind, stage = "S", op.edge.source if op.kind == "F" else op.edge.target
        elif isinstance(op, Recv):
            kind, stage = "R", op.edge.target if op.kind == "F" else op.edge.source
        else:
            return instruction
        doing = kind, stage, op.micro_batch % self._slices
        # While it waits for another rank, a thread does not use its processor.
        clock = time.thread_time if isinstance(op, (Send, Recv)) else self._clock

        def add(begin: float, end: float) -> None:
            self._now[doing] += end - begin

        return Stopwatch(instruction, add, clock)

    def end_batch(self, counts: bool) -> None:
        """Ends a batch.

        Args:
            counts: Whether it is one of those that are measured.
        """
        if counts:
            for doing, seconds in self._now.items():
                self._batches[doing].append(seconds)
        self._now.clear()

    def seconds(self) -> dict[Doing, float]:
        """Returns the median seconds in a batch, all its micro-batches together."""
        return {doing: statistics.median(samples) for doing, samples in self._batches.items()}
