from __future__ import annotations

import pytest

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import Action, Dependencies, Edge, Fused, Placement, chain
from fleetpipe.schedules.action import flatten, parse_item
from fleetpipe.schedules.placement import checked_edges, parse_edge

pytestmark = pytest.mark.no_paddle


@pytest.mark.parametrize(
    "token", ["F0.3", "B12.0", "I1.10", "W3.3", "(F0.3|B1.2)", "(F0.3|I1.2|W4.0)"]
)
def test_parsing_is_the_inverse_of_writing(token: str) -> None:
    assert str(parse_item(token)) == token


@pytest.mark.parametrize(
    "token",
    ["F0", "F0.3junk", "xF0.3", "F0.", "F.3", "F-1.3", "F00.3", "f0.3", "X0.3", "F0.3 ", "F٣.1", "",
     "(F0.3)", "(F0.3|B1.2", "(F0.3|B1)", "()", "(F0.3||B1.2)", "((F0.3|B1.2)|F1.1)"],
)  # fmt: skip
def test_parsing_reads_whole_tokens_only(token: str) -> None:
    assert parse_item(token) is None


def test_a_fused_unit_has_two_actions_or_more() -> None:
    with pytest.raises(ScheduleError, match="two actions or more"):
        Fused((Action("F", 0, 0),))


def test_flatten_opens_fused_units_in_order() -> None:
    first, second, third = Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0)
    assert list(flatten((first, Fused((second, third))))) == [first, second, third]


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


@pytest.mark.parametrize(
    ("placement", "ranks", "links"),
    [
        (Placement("loop", 3, 2), [0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1]),
        (Placement("loop", 2, 2), [0, 1, 0, 1], [0, 1, 0]),
        (Placement("vee", 3, 2), [0, 1, 2, 2, 1, 0], [0, 1, None, 1, 0]),
        (Placement("wave", 2, 4), [0, 1, 1, 0, 0, 1, 1, 0], [0, None, 0, None, 0, None, 0]),
        (Placement("wave", 3, 4), [0, 1, 2, 2, 1, 0] * 2, [0, 1, None, 1, 0, None, 0, 1, None, 1]),
    ],
)
def test_each_stage_has_its_rank_and_each_value_the_link_between_ranks(
    placement: Placement, ranks: list[int], links: list[int | None]
) -> None:
    assert [placement.rank_of(stage) for stage in range(placement.stages)] == ranks
    for rank in range(placement.ranks):
        assert [ranks[stage] for stage in placement.stages_of(rank)] == [rank] * placement.chunks
        assert list(placement.stages_of(rank)) == sorted({*placement.stages_of(rank)})
    for stage, link in enumerate(links):
        assert link is None or placement.link_of(stage) == link


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vee", 2, 1), "exactly two chunks"),
        (("wave", 2, 3), "a whole number of times two chunks"),
        (("loop", 0, 1), "ranks=0"),
        (("loop", 2, 0), "chunks=0"),
        (("loop", True, 1), "ranks=True"),
        (("lop", 2, 1), "did you mean 'loop'"),
    ],
)
def test_what_cannot_be_placed_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement(*arguments)


def test_a_stage_or_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no stage 2"):
        Placement("loop", 2).rank_of(2)
    with pytest.raises(ConfigError, match="no stage -1"):
        Placement("loop", 2).rank_of(-1)
    with pytest.raises(ConfigError, match="no rank 2"):
        Placement("loop", 2).stages_of(2)
