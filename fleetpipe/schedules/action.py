"""Actions and the other operations of a plan, as values, with their text form.

An action is one computation of one stage on one micro-batch. The other operations are sends,
receives, releases of activations, reductions of gradients and the optimizer's step. A rank's row is
the list of its operations in order; an entry of a schedule's row is an action or a fused unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules.placement import Edge, Placement, parse_edge

#: A micro-batch's number within its batch, as in actions.
MicroBatch = NewType("MicroBatch", int)
#: A micro-batch's number over all replicas: dp_rank * m plus its number within the batch.
GlobalMicroBatch = NewType("GlobalMicroBatch", int)

#: Forward, full backward, input-gradient and weight-gradient. B is I followed by W.
KINDS = ("F", "B", "I", "W")

_COUNT = r"(0|[1-9][0-9]{0,17})"
#: A micro-batch, or a slice of it: ``3`` or ``3/1``.
_NUMBER = rf"{_COUNT}(?:/{_COUNT})?"
_ACTION = re.compile(rf"([FBIW]){_COUNT}\.{_NUMBER}")
_TRANSFER = re.compile(rf"([SR])([FB])([^.]+)\.{_NUMBER}")
_FREE = re.compile(rf"FREE{_COUNT}\.{_NUMBER}")

#: The number of slices that a text without its header is assumed to cut each micro-batch into.
_MOST_SLICES = 10**6


class SliceNumber(int):
    """The number of a slice of a micro-batch: ``str(SliceNumber(3, 1, 2)) == "3/1"``.

    If sequences are cut into slices, actions have this number instead of the micro-batch's. It
    counts the slices of a batch: ``micro_batch * slices + index``.
    """

    slices: int

    def __new__(cls, micro_batch: int, index: int, slices: int) -> SliceNumber:
        """Names slice ``index``, 0..slices-1, of a micro-batch."""
        number = super().__new__(cls, micro_batch * slices + index)
        number.slices = slices
        return number

    def __reduce__(self) -> tuple[type[SliceNumber], tuple[int, int, int]]:
        return SliceNumber, (*divmod(int(self), self.slices), self.slices)

    def __str__(self) -> str:
        micro_batch, index = divmod(int(self), self.slices)
        return f"{micro_batch}/{index}"

    __repr__ = __str__


def micro_batch_numbers(micro_batches: int, slices: int) -> Sequence[int]:
    """Returns all values of ``Action.micro_batch`` in a batch, in order.

    Args:
        micro_batches: Micro-batches of a batch, m.
        slices: Slices of each micro-batch's sequence. 1: the values are 0..m-1; more: one
            :class:`SliceNumber` for each slice.
    """
    if slices == 1:
        return range(micro_batches)
    return [SliceNumber(k, index, slices) for k in range(micro_batches) for index in range(slices)]


class Action(NamedTuple):
    """One computation: ``str(Action("F", 0, 3)) == "F0.3"``.

    Attributes:
        kind: "F" forward, "B" full backward, "I" input-gradient, "W" weight-gradient.
        stage: Global stage, 0..stages-1, never a chunk of a rank.
        micro_batch: Micro-batch, 0..micro_batches-1; or the :class:`SliceNumber` of one of its
            slices, written ``F0.3/1``.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Fused:
    """Actions that one rank runs as one unit and may overlap: ``(F0.3|B1.2)``.

    The unit begins when the inputs of all its actions are there, and its results leave together at
    its end. So its actions must not depend on each other.

    Args:
        actions: Two actions or more, in the order in which they run if nothing overlaps.

    Raises:
        ScheduleError: Fewer than two actions.
    """

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(self.actions))
        if len(self.actions) < 2:
            raise ScheduleError(
                "a fused unit needs two actions or more",
                got=str(self),
                fix="write a single action without parentheses",
            )

    def __str__(self) -> str:
        return "(" + "|".join(map(str, self.actions)) + ")"


#: An entry of a rank's row in a schedule.
Item = Action | Fused


def parts(item: Item) -> tuple[Action, ...]:
    """Returns the actions of an entry of a row: those of a fused unit, or the action itself."""
    return (item,) if isinstance(item, Action) else item.actions


def flatten(row: Iterable[Item]) -> Iterator[Action]:
    """Yields all actions of a row in order, with fused units taken apart."""
    for item in row:
        yield from parts(item)


def parse_number(micro_batch: str, index: str | None, slices: int | None) -> int | None:
    """Reads the digits of a micro-batch and its slice, as in ``F0.3/1``.

    Args:
        micro_batch: The digits before the slash, ``"3"``.
        index: The digits after the slash, ``"1"``; None without a slash.
        slices: Slices of a micro-batch; None if that is not known.

    Returns:
        The number of the micro-batch, or of the slice; None if there is no such slice, or if a
        slice is missing where micro-batches have several.
    """
    if index is None:
        return int(micro_batch) if slices in (None, 1) else None
    count = _MOST_SLICES if slices is None else slices
    exists = count > 1 and int(index) < count
    return SliceNumber(int(micro_batch), int(index), count) if exists else None


def parse_item(token: str, slices: int | None = None) -> Item | None:
    """Reads an entry such as ``F0.3``, ``F0.3/1`` or ``(F0.3|B1.2)``; None if it is malformed.

    Args:
        token: The text, without spaces around it.
        slices: Slices of a micro-batch; None if that is not known.
    """
    action = _parse_action(token, slices)
    if action is not None:
        return action
    if not (token.startswith("(") and token.endswith(")")):
        return None
    inner = [_parse_action(part, slices) for part in token[1:-1].split("|")]
    actions = tuple(action for action in inner if action is not None)
    return Fused(actions) if len(actions) == len(inner) and len(actions) > 1 else None


def _parse_action(token: str, slices: int | None) -> Action | None:
    """Reads a single action such as ``F0.3``; None if the text is malformed."""
    match = _ACTION.fullmatch(token)
    number = None if match is None else parse_number(match[3], match[4], slices)
    return None if match is None or number is None else Action(match[1], int(match[2]), number)


# The last field of each class is not for callers: it makes tuples of different classes unequal.


class Send(NamedTuple):
    """``SF0>1.3``: hand the F value of edge 0>1, micro-batch 3, to the rank of stage 1.

    Attributes:
        kind: "F" the value of the edge, or "B" its gradient, which the consumer's rank sends.
        edge: The edge, always written producer>consumer of the value.
        micro_batch: The micro-batch.
    """

    kind: str
    edge: Edge
    micro_batch: int
    letter: str = "S"

    def __str__(self) -> str:
        return f"S{self.kind}{self.edge}.{self.micro_batch}"


class Recv(NamedTuple):
    """``RF0>1.3``: post the receive that answers ``SF0>1.3``; the value is needed later.

    Attributes:
        kind: "F" the value of the edge, or "B" its gradient, which the producer's rank receives.
        edge: The edge, always written producer>consumer of the value.
        micro_batch: The micro-batch.
    """

    kind: str
    edge: Edge
    micro_batch: int
    letter: str = "R"

    def __str__(self) -> str:
        return f"R{self.kind}{self.edge}.{self.micro_batch}"


class Free(NamedTuple):
    """``FREE0.3``: release the activations of a stage and micro-batch."""

    stage: int
    micro_batch: int
    letter: str = "FREE"

    def __str__(self) -> str:
        return f"FREE{self.stage}.{self.micro_batch}"


class Reduce(NamedTuple):
    """``REDUCE``: reduce the gradients over tied weights and replicas."""

    letter: str = "REDUCE"

    def __str__(self) -> str:
        return self.letter


class Step(NamedTuple):
    """``STEP``: let the optimizer update the parameters."""

    letter: str = "STEP"

    def __str__(self) -> str:
        return self.letter


Op = Action | Fused | Send | Recv | Free | Reduce | Step


def parse_op(token: str, slices: int | None = None) -> Op | None:
    """Reads one operation of a plan; None if the text is malformed.

    Args:
        token: The text of an operation, such as ``"F0.3"``, ``"SF0>1.3"`` or ``"STEP"``.
        slices: Slices of a micro-batch; None if that is not known.
    """
    if token == "REDUCE":
        return Reduce()
    if token == "STEP":
        return Step()
    item = parse_item(token, slices)
    if item is not None:
        return item
    match = _FREE.fullmatch(token)
    if match is not None:
        number = parse_number(match[2], match[3], slices)
        return None if number is None else Free(int(match[1]), number)
    match = _TRANSFER.fullmatch(token)
    edge = None if match is None else parse_edge(match[3])
    if match is None or edge is None:
        return None
    number = parse_number(match[4], match[5], slices)
    return None if number is None else (Send if match[1] == "S" else Recv)(match[2], edge, number)


def ranks_of(op: Send | Recv, placement: Placement) -> tuple[int, int]:
    """Returns the rank that sends the message of a transfer, and the rank that receives it."""
    source, target = placement.rank_of(op.edge.source), placement.rank_of(op.edge.target)
    return (source, target) if op.kind == "F" else (target, source)
