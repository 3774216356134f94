"""The operations of a plan besides actions: sends, receives, releases, reductions and the step."""

from __future__ import annotations

import re
from typing import NamedTuple

from fleetpipe.schedules.action import Action, Fused, parse_item, parse_number
from fleetpipe.schedules.edges import Edge, parse_edge
from fleetpipe.schedules.placement import Placement

_NUMBER = r"(0|[1-9][0-9]{0,17})(?:/(0|[1-9][0-9]{0,17}))?"
_TRANSFER = re.compile(r"([SR])([FB])([^.]+)\." + _NUMBER)
_FREE = re.compile(r"FREE(0|[1-9][0-9]{0,17})\." + _NUMBER)

# The last field of each class is not for callers: it tells apart tuples of the same content.


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
    """Reads one token of a plan; None if it is not valid.

    Args:
        token: The text.
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
    """Returns the ranks that send and receive the message of ``op``."""
    source, target = placement.rank_of(op.edge.source), placement.rank_of(op.edge.target)
    return (source, target) if op.kind == "F" else (target, source)
