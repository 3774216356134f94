"""Bugs in a user's script, and in a program, are named; a selection of those that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetpipe.paddle_api import VERSION
from tests.contrib.locator import seeded
from tests.contrib.locator.bugs import located, right

pytestmark = pytest.mark.processes


@pytest.mark.once_for("column-backward-not-reduced")
@pytest.mark.parametrize("name", ["no-tied-reduction", "column-backward-not-reduced"])
def test_a_bug_is_named(name: str) -> None:
    assert right(name)


@pytest.mark.parametrize("name", ["statistics-frozen", "positions-from-zero", "expert-twice"])
def test_a_bug_of_another_axis_is_named(name: str, tmp_path: Path) -> None:
    if VERSION.startswith("2.") and "ep" in seeded.BUGS[name].axes:
        pytest.skip("2.6.2 has no ep_degree")
    assert seeded.right(name, tmp_path)


@pytest.mark.once
def test_a_right_program_whose_degrees_are_set_to_one_gives_no_alarm() -> None:
    assert located("dp2", ["--dropout", "0.1"], "--steps", "2") == (0, None)
