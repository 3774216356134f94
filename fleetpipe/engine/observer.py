"""What watches batches and the operations of the engine.

An observer is asked once, when a plan is compiled, what shall run in the place of each operation:
one that nobody watches costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from fleetpipe.schedules import Op, Recv, Send
from fleetpipe.transport import MessageKey, Value


class Blocked(NamedTuple):
    """The message that a rank cannot go on without."""

    peer: int
    key: MessageKey


#: Does its part of the plan and returns None, or returns what it waits for and is called again.
Instruction = Callable[[], Blocked | None]


class Played(Protocol):
    """What an observer may look at of a rank that the engine plays.

    Attributes:
        rank: The rank of the pipeline.
        values: The values that the rank holds now, by the message that brings or takes them.
    """

    @property
    def rank(self) -> int:
        """The rank of the pipeline."""

    @property
    def values(self) -> Mapping[MessageKey, Value]:
        """The values that the rank holds now."""


class Observer(Protocol):
    """Watches what the engine does; an operation that it leaves alone costs nothing."""

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns what the engine calls in the place of ``instruction``: that one, or around it.

        Args:
            played: The rank that runs the instruction.
            op: What it does: an action without its receives, a receive (which may have to be called
                again, and is done when it returns None), a send, a release or a collective.
            instruction: What does it.
        """


class BatchObserver:
    """Watches training batches. A subclass has the methods that it needs; these do nothing.

    All but :meth:`wrap` are called once in a batch, on every rank, and may be collective.

    Attributes:
        in_evaluation: Whether it watches the operations of evaluations too.
    """

    in_evaluation = False

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :meth:`Observer.wrap`."""
        return instruction

    def begin(self, batch: Any) -> None:
        """Called before anything of a batch runs; what this raises leaves all as it was.

        Args:
            batch: A :class:`fleetpipe.dygraph.batch.observed.ObservedBatch`; None of a static
                program.
        """

    def computed(self) -> None:
        """Called when the gradients of this rank's micro-batches are added up, of this rank's only.

        What this or a later method raises ends the batch, which leaves no gradients then.
        """

    def reduced(self, loss: Any) -> None:
        """Called when the gradients of all ranks are added up, with the loss of the batch."""

    def step(self, step: Callable[[], None], optimizer: Any, scaled: bool) -> None:
        """Called in the place of the optimizer's step.

        Args:
            step: Takes the step.
            optimizer: What ``step`` steps.
            scaled: Whether a scaler divides the gradients within it.
        """
        step()

    def end(self) -> None:
        """Called when all operations of a batch have run, unless one of them failed."""


class Observers(BatchObserver):
    """Several observers as one, in an order: what one of them does lies within the next one.

    Around an operation and around the optimizer's step the first is innermost. It is called first
    at the other moments, and last at the end.

    Attributes:
        members: The observers. One that is no :class:`BatchObserver` watches operations only, those
            of evaluations too.
    """

    def __init__(self, *members: Observer) -> None:
        self.members = list(members)

    def in_evaluations(self) -> Iterator[Observer]:
        """Yields those that watch the operations of evaluations."""
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
        """See :meth:`BatchObserver.begin`."""
        for member in self._of_batches():
            member.begin(batch)

    def computed(self) -> None:
        """See :meth:`BatchObserver.computed`."""
        for member in self._of_batches():
            member.computed()

    def reduced(self, loss: Any) -> None:
        """See :meth:`BatchObserver.reduced`."""
        for member in self._of_batches():
            member.reduced(loss)

    def step(self, step: Callable[[], None], optimizer: Any, scaled: bool) -> None:
        """See :meth:`BatchObserver.step`."""
        for member in self._of_batches():
            step = functools.partial(member.step, step, optimizer, scaled)
        step()

    def end(self) -> None:
        """See :meth:`BatchObserver.end`."""
        for member in reversed(self._of_batches()):
            member.end()

    def _of_batches(self) -> list[BatchObserver]:
        return [member for member in self.members if isinstance(member, BatchObserver)]


def message_of(op: Send | Recv) -> MessageKey:
    """Returns what names the message that ``op`` is one end of."""
    return MessageKey(op.kind, op.edge.source, op.edge.target, op.edge.name, int(op.micro_batch))
