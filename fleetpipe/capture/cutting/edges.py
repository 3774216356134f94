"""Finds the values that cross between the stages of a capture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from fleetpipe.capture.running.replay import name_of
from fleetpipe.capture.tracing.value import Capture, ValueId
from fleetpipe.schedules import Edge


def crossing(trace: Capture, starts: Sequence[int]) -> dict[Edge, tuple[str, ...]]:
    """Returns the values on each edge, by name: each goes straight to every stage that uses it.

    Args:
        trace: The run.
        starts: The first node of each stage after stage 0; the model's inputs are in stage 0, its
            outputs in the last stage.
    """

    def stage_of(node: int | None) -> int:
        return 0 if node is None else bisect_right(starts, node)

    takers = [(stage_of(number), node.uses) for number, node in enumerate(trace.nodes)]
    takers.append((len(starts), set(trace.output_values)))
    values: dict[Edge, set[ValueId]] = {}
    for stage, uses in takers:
        for value in uses:
            source = stage_of(trace.maker(value))
            if source != stage:
                values.setdefault(Edge(source, stage), set()).add(value)
    return {edge: tuple(map(name_of, sorted(values[edge]))) for edge in sorted(values)}
