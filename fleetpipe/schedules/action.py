"""What one rank does at one moment: an action on one stage and one micro-batch, as a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, NewType, Union

from fleetpipe.errors import ScheduleError

#: A micro-batch's number within its batch, as actions have it.
MicroBatch = NewType("MicroBatch", int)
#: Its number over all replicas: the data-parallel rank times m, plus the one within the batch.
GlobalMicroBatch = NewType("GlobalMicroBatch", int)

#: Forward, full backward, input-gradient and weight-gradient. B is I followed by W.
KINDS = ("F", "B", "I", "W")

_ACTION = re.compile(r"([FBIW])(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


class Action(NamedTuple):
    """One computation: ``str(Action("F", 0, 3)) == "F0.3"``.

    Attributes:
        kind: "F" forward, "B" full backward, "I" input-gradient, "W" weight-gradient.
        stage: Global stage, 0..stages-1, never a chunk of a rank.
        micro_batch: Micro-batch, 0..micro_batches-1.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Fused:
    """Actions that one rank runs as one unit and may overlap: ``(F0.3|B1.2)``.

    The unit begins when everything that any of its actions waits for is there, and its results
    leave together at its end. So its actions must not depend on each other.

    Args:
        actions: Two actions or more, in the order in which they run where nothing overlaps.

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


#: An entry of a rank's row.
Item = Union[Action, Fused]


def parts(item: Item) -> tuple[Action, ...]:
    """Returns the actions of an entry: those of a fused unit, or the one action itself."""
    return (item,) if isinstance(item, Action) else item.actions


def flatten(row: Iterable[Item]) -> Iterator[Action]:
    """Yields the actions of a row in order, fused units opened."""
    for item in row:
        yield from parts(item)


def parse_item(token: str) -> Item | None:
    """Reads ``F0.3`` or ``(F0.3|B1.2)``; None where the whole token is neither."""
    match = _ACTION.fullmatch(token)
    if match is not None:
        return Action(match[1], int(match[2]), int(match[3]))
    if not (token.startswith("(") and token.endswith(")")):
        return None
    inner = [_ACTION.fullmatch(part) for part in token[1:-1].split("|")]
    found = tuple(Action(m[1], int(m[2]), int(m[3])) for m in inner if m is not None)
    return Fused(found) if len(found) == len(inner) and len(found) > 1 else None
