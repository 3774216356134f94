"""The values that cross between stages. A table names the modules that special placements need."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Protocol

from fleetpipe.aliases import Nest
from fleetpipe.engine.stage import Values
from fleetpipe.schedules import Edge, Placement


class Borders(Protocol):
    """Translates between the values of edges and those that a stage's layers take and return."""

    def join(self, values: Values) -> Nest:
        """Returns the value that the layers of a stage take, from those of all edges into it."""

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the value of each edge out of a stage, in order.

        Args:
            stage: The stage, any but the last.
            output: The value that its layers returned.
            labels: The labels of the micro-batch; None if this process has none.

        Raises:
            BoundaryError: The stage does not have the value of some edge.
        """


class Chain:
    """The borders of a list of layers: each stage takes the value that the one before returns."""

    def __init__(self, placement: Placement) -> None:
        self._edges: dict[int, list[Edge]] = {}
        for ends in placement.chain():
            self._edges.setdefault(ends[0], []).append(Edge(*ends))

    def join(self, values: Values) -> Nest:
        """Returns the value of the one edge."""
        return next(iter(values.values()))

    def split(self, stage: int, output: Nest, labels: Nest) -> Values:
        """Returns the output as the value of each edge."""
        return dict.fromkeys(self._edges[stage], output)


#: What makes the borders of a placement, as ``module:name``, and whether the placement has them.
BORDERS: Mapping[str, Callable[[Placement], bool]] = {
    "fleetpipe.contrib.vocabulary.borders:HeadBorders": lambda placement: placement.has_head
}


def borders_of(placement: Placement) -> Borders:
    """Returns the borders that the stages of a placement have."""
    for make, wanted in BORDERS.items():
        if wanted(placement):
            borders: Borders = pkgutil.resolve_name(make)(placement)
            return borders
    return Chain(placement)
