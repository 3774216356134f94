from __future__ import annotations

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.schedules import Dependencies, Edge, Placement, chain
from fleetpipe.schedules.edges import checked_edges, parse_edge


def test_the_chain_waits_for_its_neighbours() -> None:
    rule = Dependencies(chain(3), 3)
    assert rule.of("F", 0) == ()
    assert rule.of("F", 1) == (("F", 0),)
    assert rule.of("B", 1) == rule.of("I", 1) == (("F", 1), ("B", 2))
    assert rule.of("B", 2) == (("F", 2),)
    assert rule.of("W", 1) == (("B", 1),)


def test_a_skip_connection_is_waited_for_at_both_ends() -> None:
    rule = Dependencies((*chain(3), Edge(0, 2, "mask"), Edge(0, 2, "skip")), 3)
    assert rule.of("F", 2) == (("F", 0), ("F", 1))
    assert rule.of("B", 0) == (("F", 0), ("B", 1), ("B", 2))


@pytest.mark.parametrize("text", ["0>1", "3>12:mask_2-a"])
def test_edges_are_read_as_written(text: str) -> None:
    assert str(parse_edge(text)) == text


@pytest.mark.parametrize("text", ["0", "0>1:", "0>1:a.b", "00>1", "0>1 ", "0<1", "0>1:a,b"])
def test_what_is_no_edge_is_not_read(text: str) -> None:
    assert parse_edge(text) is None


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([Edge(1, 1)], "1>1 does not lead from a stage to a later one"),
        ([Edge(2, 1)], "2>1 does not lead"),
        ([Edge(0, 3)], "0>3 does not lead"),
        ([Edge(0, 1), Edge(0, 1)], "0>1 stands twice"),
        ([Edge(0, 1, "a b")], "has the name 'a b'"),
    ],
)
def test_edges_that_cannot_be_are_refused(edges: list[Edge], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_edges(edges, Placement("loop", 3))
