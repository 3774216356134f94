from __future__ import annotations

import pytest

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules import Action, Fused
from fleetpipe.schedules.action import flatten, parse_item


def test_an_action_is_written_as_kind_stage_and_micro_batch() -> None:
    assert str(Action("F", 0, 3)) == "F0.3"
    assert str(Fused((Action("F", 0, 3), Action("B", 1, 2)))) == "(F0.3|B1.2)"


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
