"""What crosses between the stages of a model: a table, whose modules are loaded by placements."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Protocol

from fleetpipe.aliases import Nest
from fleetpipe.engine.stage import Values
from fleetpipe.schedules import Edge, Placement


class Borders(Protocol):
    """What crosses between the stages of a model."""

    def joined(self, values: Values) -> Nest:
        """Returns what the layers of a stage take, of the value of each edge into it."""

    def parted(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns what leaves a stage on each edge, in order.

        Args:
            stage: The stage, any but the last.
            output: What its layers returned.
            labels: Those of the micro-batch; None if this process was given none.

        Raises:
            BoundaryError: Something is to leave it that it does not have.
        """


class Chain:
    """The borders of a list of layers: what one stage returns is what the next takes."""

    def __init__(self, placement: Placement) -> None:
        self._edges: dict[int, list[Edge]] = {}
        for ends in placement.chain():
            self._edges.setdefault(ends[0], []).append(Edge(*ends))

    def joined(self, values: Values) -> Nest:
        """Returns the value of the one edge."""
        return next(iter(values.values()))

    def parted(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the output as the value of each edge."""
        return dict.fromkeys(self._edges[stage], output)


#: What makes the borders of a placement, as ``module:name``, and whether the placement has them.
BORDERS: Mapping[str, Callable[[Placement], bool]] = {
    "fleetpipe.dygraph.vocabulary.borders:HeadBorders": lambda placement: placement.has_head
}


def borders_of(placement: Placement) -> Borders:
    """Returns the borders of a list of layers."""
    for make, wanted in BORDERS.items():
        if wanted(placement):
            borders: Borders = pkgutil.resolve_name(make)(placement)
            return borders
    return Chain(placement)
