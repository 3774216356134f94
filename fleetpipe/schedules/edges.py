"""Edges, and the one rule of what an action waits for: verify, simulate and lower all use it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.representation import shows
from fleetpipe.schedules.placement import Placement

_EDGE = re.compile(r"(0|[1-9][0-9]{0,17})>(0|[1-9][0-9]{0,17})(?::([A-Za-z_][A-Za-z0-9_-]*))?")


class Edge(NamedTuple):
    """A value that leaves one stage and enters a later one: ``0>1`` or, named, ``0>2:mask``.

    The chain s -> s+1 is the usual case; a skip connection is an edge over several stages.

    Attributes:
        source: Stage that computes the value.
        target: Stage that takes it, later than ``source``.
        name: Tells edges between the same two stages apart; empty for the usual one.
    """

    source: int
    target: int
    name: str = ""

    def __str__(self) -> str:
        label = f":{self.name}" if self.name else ""
        return f"{self.source}>{self.target}{label}"


def parse_edge(text: str) -> Edge | None:
    """Reads ``0>1`` or ``0>2:mask``; None if the text is not an edge."""
    match = _EDGE.fullmatch(text)
    return None if match is None else Edge(int(match[1]), int(match[2]), match[3] or "")


def chain(stages: int) -> tuple[Edge, ...]:
    """Returns the edges 0>1, 1>2, .. of a model without skip connections."""
    return tuple(Edge(stage, stage + 1) for stage in range(stages - 1))


def checked_edges(edges: Iterable[Edge] | None, placement: Placement) -> tuple[Edge, ...]:
    """Returns ``edges`` sorted; for None the chain, with the edges of a head if there is one.

    Raises:
        ConfigError: An edge that runs backwards, leaves the model, occurs twice, or has a name that
            the text form cannot hold.
    """
    stages = placement.stages
    if edges is None:
        return tuple(Edge(*ends) for ends in placement.chain())
    ordered = tuple(sorted(Edge(*edge) for edge in edges))
    for edge, following in zip(ordered, (*ordered[1:], None)):
        if not 0 <= edge.source < edge.target < stages:
            raise ConfigError(
                f"edge {edge} does not lead from a stage to a later one",
                expected=f"0 <= source < target < {stages}",
                fix="name the earlier stage first, and only stages that exist",
            )
        if parse_edge(str(edge)) != edge:
            raise ConfigError(
                f"edge {edge.source}>{edge.target} has the name {edge.name!r}",
                expected="letters, digits, - and _, beginning with a letter or _",
                fix="choose another name",
            )
        if edge == following:
            raise ConfigError(f"edge {edge} stands twice", fix="give each edge its own name")
    return ordered


def crossing_edges(
    placement: Placement, edges: Iterable[Edge]
) -> tuple[list[list[tuple[Edge, int]]], list[list[tuple[Edge, int]]]]:
    """Returns, for each stage, the edges that leave it and those that enter it between ranks.

    Each comes with the rank at its other end. An edge whose stages share a rank is left out.
    """
    leaving: list[list[tuple[Edge, int]]] = [[] for _ in range(placement.stages)]
    entering: list[list[tuple[Edge, int]]] = [[] for _ in range(placement.stages)]
    for edge in edges:
        source, target = placement.rank_of(edge.source), placement.rank_of(edge.target)
        if source != target:
            leaving[edge.source].append((edge, target))
            entering[edge.target].append((edge, source))
    return leaving, entering


@shows(stages="_sources")
class Dependencies:
    """The actions that each action waits for, all of the same micro-batch.

    - F(s) waits for F(e.source) of every edge e into s;
    - B(s) and I(s) wait for F(s), and for the backward of e.target of every edge e out of s;
    - W(s) waits for I(s).

    If sequences are cut into slices, see also :func:`slice_before`.

    In the results "B" means the backward that hands gradients on: B, or I if the backward is split.

    Args:
        edges: The edges of the model, as :func:`checked_edges` returns them.
        stages: Number of stages.
    """

    def __init__(self, edges: Iterable[Edge], stages: int) -> None:
        sources: list[set[int]] = [set() for _ in range(stages)]
        targets: list[set[int]] = [set() for _ in range(stages)]
        for edge in edges:
            sources[edge.target].add(edge.source)
            targets[edge.source].add(edge.target)
        self._sources = [sorted(numbers) for numbers in sources]
        self._targets = [sorted(numbers) for numbers in targets]

    def of(self, kind: str, stage: int) -> tuple[tuple[str, int], ...]:
        """Returns the (kind, stage) pairs that ``kind`` of ``stage`` waits for."""
        if kind == "F":
            return tuple(("F", source) for source in self._sources[stage])
        if kind == "W":
            return (("B", stage),)
        return (("F", stage), *(("B", target) for target in self._targets[stage]))


def slice_before(kind: str, index: int, slices: int) -> int:
    """Returns the distance to the slice whose ``kind`` has to run before; 0 if there is none.

    A forward needs the results of the slice before it, -1. Backwards run in the other order, +1.
    """
    if kind == "F":
        return -1 if index > 0 else 0
    return 1 if kind != "W" and index + 1 < slices else 0
