"""Finds the values that cross between the stages of a capture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from fleetpipe.capture.running.replay import name_of
from fleetpipe.capture.tracing.value import Capture, ValueId
from fleetpipe.schedules import Edge


def crossing(
    trace: Capture, starts: Sequence[int], edges: Collection[Edge] = ()
) -> dict[Edge, tuple[str, ...]]:
    """Returns the values on each edge, by name: each goes straight to every stage that uses it.

    Args:
        trace: The run.
        starts: The first node of each stage after stage 0; the model's inputs are in stage 0, its
            outputs in the last stage.
        edges: Those of the pipeline, if it has stages already: where none leads straight to a
            stage, a value goes there over others.
    """

    def stage_of(node: int | None) -> int:
        return 0 if node is None else bisect_right(starts, node)

    takers = [(stage_of(number), node.uses) for number, node in enumerate(trace.nodes)]
    takers.append((len(starts), set(trace.output_values)))
    values: dict[Edge, set[ValueId]] = {}
    for stage, uses in takers:
        for value in uses:
            source = stage_of(trace.maker(value))
            for edge in _route(source, stage, edges) if source != stage else ():
                values.setdefault(edge, set()).add(value)
    return {edge: tuple(map(name_of, sorted(values[edge]))) for edge in sorted(values)}


def _route(source: int, stage: int, edges: Collection[Edge]) -> list[Edge]:
    """Returns the fewest edges that lead from a stage to a later one; a new one if none do."""
    routes = {source: list[Edge]()}
    for between in range(source, stage):
        for edge in edges if between in routes else ():
            if edge.source == between and edge.target <= stage:
                route = [*routes[between], edge]
                routes[edge.target] = min(routes.get(edge.target, route), route, key=len)
    return routes.get(stage, [Edge(source, stage)])
