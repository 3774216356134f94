"""``--rows``: the rows of a table that run on an older Paddle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import rows_left_out

pytestmark = pytest.mark.once


class Item:
    """A test as pytest collects it, by its name and its markers."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid, self.markers = nodeid, markers

    def get_closest_marker(self, name: str) -> object:
        """The marker of a name, or None."""
        return name if name in self.markers else None


def test_the_first_the_last_and_rows_between_stay() -> None:
    table = [Item(f"tests/a.py::test_one[{n}-x]") for n in range(9)]
    others = [Item("tests/a.py::test_two"), *(Item(f"tests/a.py::test_three[{n}]") for n in "ab")]
    every = [Item(f"tests/b.py::test_names[{n}]", "every_row") for n in range(5)]
    items: list[Any] = [*table, *others, *every]
    left = rows_left_out(items, 3)
    assert [item for item in items if item not in left] == [
        table[0],
        table[4],
        table[8],
        *others,
        *every,
    ]
    assert len(rows_left_out(items, 1)) == 8 + 1
