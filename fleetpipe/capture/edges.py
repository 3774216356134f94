"""Which values cross between the stages of a capture that is cut."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from fleetpipe.aliases import Nest
from fleetpipe.capture.replay import name_of
from fleetpipe.capture.value import Trace, ValueId
from fleetpipe.engine.stage import Values
from fleetpipe.schedules import Edge

#: The values on each edge, in order.
Crossing = Mapping[Edge, tuple[ValueId, ...]]


def crossing(trace: Trace, starts: Sequence[int]) -> dict[Edge, tuple[ValueId, ...]]:
    """Returns the edges of a cut, sorted: every value goes straight to each stage that takes it.

    Args:
        trace: The run.
        starts: The first node of each stage but stage 0; the model's inputs are in stage 0, its
            outputs in the last stage.
    """

    def stage_of(node: int | None) -> int:
        return 0 if node is None else bisect_right(starts, node)

    takers = [(stage_of(number), node.uses) for number, node in enumerate(trace.nodes)]
    takers.append((len(starts), set(trace.output_values)))
    found: dict[Edge, set[ValueId]] = {}
    for stage, uses in takers:
        for value in uses:
            source = stage_of(trace.maker(value))
            if source != stage:
                found.setdefault(Edge(source, stage), set()).add(value)
    return {edge: tuple(sorted(found[edge])) for edge in sorted(found)}


class CapturedBorders:
    """The borders of a capture's stages; see :class:`fleetpipe.dygraph.batch.stage.Borders`."""

    def __init__(self, crossing: Crossing, stages: int) -> None:
        """Takes the values on each edge."""
        self._out: list[dict[Edge, tuple[str, ...]]] = [{} for _ in range(stages)]
        for edge, values in crossing.items():
            self._out[edge.source][edge] = tuple(map(name_of, values))

    def joined(self, values: Values) -> Nest:
        """Returns all values that came, by name."""
        return {name: tensor for part in values.values() for name, tensor in part.items()}

    def parted(self, stage: int, output: Nest) -> Values:
        """Returns the values on each edge out of a stage, by name."""
        return {
            edge: {name: output[name] for name in names} for edge, names in self._out[stage].items()
        }
