"""Bugs in a user's script are named; a selection of those that ``bugs.py`` has."""

from __future__ import annotations

import pytest

from tests.contrib.locator.bugs import BUGS, located, right

pytestmark = pytest.mark.processes


@pytest.mark.once_for("column-backward-not-reduced")
@pytest.mark.parametrize("name", ["no-tied-reduction", "column-backward-not-reduced"])
def test_a_bug_is_named(name: str) -> None:
    assert name in BUGS
    assert right(name)


@pytest.mark.once
def test_a_right_program_whose_degrees_are_set_to_one_gives_no_alarm() -> None:
    assert located("dp2", ["--dropout", "0.1"], "--steps", "2") == (0, None)
