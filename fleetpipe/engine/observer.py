"""Observers watch batches and the operations of the engine, as meters, guards and traces do.

An observer may wrap each operation, once, when a plan is compiled; one that wraps none costs
nothing. A stopwatch times an operation that may be called several times until it is done.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from fleetpipe.mesh.turns import here, without_other_turns
from fleetpipe.schedules import Op, Recv, Send
from fleetpipe.transport import MessageKey, Value


class Blocked(NamedTuple):
    """The message without which a rank cannot go on: the rank that sends it, and its key."""

    peer: int
    key: MessageKey


#: Runs a part of an operation, such as one receive or one action, and returns None. If it lacks a
#: message, it returns that message instead, and is called again once the message is there.
Instruction = Callable[[], Blocked | None]


class Played(Protocol):
    """A rank that the engine plays, as observers see it."""

    @property
    def rank(self) -> int:
        """The rank of the pipeline."""

    @property
    def values(self) -> Mapping[MessageKey, Value]:
        """The values computed or received and not passed on, by the key of their message."""


class Observer(Protocol):
    """Watches the operations of the engine; an operation that it does not wrap costs nothing."""

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns the instruction to run in place of ``instruction``: itself, or a wrapper of it.

        Args:
            played: The rank that runs the instruction.
            op: The operation that it runs: an action without its receives, a receive (which may
                have to be called again, and is done when it returns None), a send, a release or a
                collective.
            instruction: The instruction.
        """


class BatchObserver:
    """Watches training batches. A subclass overrides the methods that it needs; these do nothing.

    All but :meth:`wrap` are called once in a batch, on every rank, and may be collective.

    Attributes:
        in_evaluation: Whether it watches the operations of evaluations too.
    """

    in_evaluation = False

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns ``instruction`` itself, so that it is not observed."""
        return instruction

    def begin(self, batch: Any) -> None:
        """Prepares for a batch before it runs anything; an error that this raises changes nothing.

        Args:
            batch: A :class:`fleetpipe.dygraph.batch.micro_batches.ObservedBatch`; None of a static
                program.
        """

    def computed(self) -> None:
        """Runs when this rank has summed the gradients of its own micro-batches.

        If this or a later method raises an error, the batch ends and leaves no gradients.
        """

    def reduced(self, loss: Any) -> None:
        """Runs when gradients are summed over all ranks; gets the loss of the batch."""

    def step(self, step: Callable[[], None], optimizer: Any, scaled: bool) -> None:
        """Takes the optimizer's step: a subclass may act before and after ``step()``.

        Args:
            step: Takes the step.
            optimizer: The optimizer that ``step`` steps.
            scaled: Whether a scaler divides the gradients within it.
        """
        step()

    def end(self) -> None:
        """Runs when all operations of a batch have run, unless one failed."""


class Observers(BatchObserver):
    """Joins several observers to one, nested in their order.

    The first one is innermost around an operation and around the optimizer's step. It is called
    first at the other moments, and last at the end.

    Attributes:
        members: The observers. One that is no :class:`BatchObserver` watches operations only, those
            of evaluations too.
    """

    def __init__(self, *members: Observer) -> None:
        """Joins ``members``, the innermost first."""
        self.members = list(members)

    def in_evaluations(self) -> Iterator[Observer]:
        """Yields the observers that also watch the operations of evaluations."""
        for member in self.members:
            if isinstance(member, Observers):
                yield from member.in_evaluations()
            elif getattr(member, "in_evaluation", True):
                yield member

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns ``instruction`` with all observers around it."""
        for member in self.members:
            instruction = member.wrap(played, op, instruction)
        return instruction

    def begin(self, batch: Any) -> None:
        """Calls the members' :meth:`BatchObserver.begin`."""
        for member in self._batch_observers():
            member.begin(batch)

    def computed(self) -> None:
        """Calls the members' :meth:`BatchObserver.computed`."""
        for member in self._batch_observers():
            member.computed()

    def reduced(self, loss: Any) -> None:
        """Calls the members' :meth:`BatchObserver.reduced`."""
        for member in self._batch_observers():
            member.reduced(loss)

    def step(self, step: Callable[[], None], optimizer: Any, scaled: bool) -> None:
        """Takes the step within the members' :meth:`BatchObserver.step`."""
        for member in self._batch_observers():
            step = functools.partial(member.step, step, optimizer, scaled)
        step()

    def end(self) -> None:
        """Calls the members' :meth:`BatchObserver.end`, the first member last."""
        for member in reversed(self._batch_observers()):
            member.end()

    def _batch_observers(self) -> list[BatchObserver]:
        """Returns the members that watch batches, not only operations."""
        return [member for member in self.members if isinstance(member, BatchObserver)]


def message_of(op: Send | Recv) -> MessageKey:
    """Returns the key of the message that ``op`` sends or receives."""
    return MessageKey(op.kind, op.edge.source, op.edge.target, op.edge.name, int(op.micro_batch))


class Stopwatch:
    """An instruction that is timed from its first call to the end of its last one.

    An instruction that lacks a message is called again once the message is there; the time includes
    the wait, also a wait for the first of several messages. An instruction that raises an error is
    not recorded. If two instructions take turns, each has the time of its own turns.
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
        """Runs the instruction and times it; returns as every :data:`Instruction` does."""
        begin = self._clock() - here.idle if self._begin is None else self._begin
        self._begin = None
        blocked = self._instruction()
        if blocked is None:
            self._record(*without_other_turns(begin, self._clock()))
        else:
            self._begin = begin
        return blocked
