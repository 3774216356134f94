"""What watches the engine: asked once, when a plan is compiled, what shall run in place of what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Callable, NamedTuple, Protocol, Union

from fleetpipe.schedules import Op, Recv, Send
from fleetpipe.transport import MessageKey, Value


class Blocked(NamedTuple):
    """The message that a rank cannot go on without."""

    peer: int
    key: MessageKey


#: Does its part of the plan and returns None, or returns what it waits for and is called again.
Instruction = Callable[[], Union[Blocked, None]]


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


def message_of(op: Send | Recv) -> MessageKey:
    """Returns what names the message that ``op`` is one end of."""
    return MessageKey(op.kind, op.edge.source, op.edge.target, op.edge.name, int(op.micro_batch))


def wrapped(
    observers: Iterable[Observer], played: Played, op: Op, instruction: Instruction
) -> Instruction:
    """Returns ``instruction`` with all observers around it, the first one innermost."""
    for observer in observers:
        instruction = observer.wrap(played, op, instruction)
    return instruction
