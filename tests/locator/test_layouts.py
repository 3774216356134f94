"""Which part of a whole tensor a rank has."""

from __future__ import annotations

import numpy as np
import pytest

from fleetpipe.locator.layouts import DimensionCut, Layout, layouts, part_of, put_part

WHOLE = np.arange(8 * 6).reshape(8, 6)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ((DimensionCut(0, ("mp",)),), [4, 5, 6, 7]),
        ((DimensionCut(0, ("mp",), parts=2),), [2, 3, 6, 7]),
        ((DimensionCut(0, ("cp",), zigzag=True),), [2, 3, 4, 5]),
        ((DimensionCut(0, ("sep", "mp")),), [6, 7]),
    ],
)
def test_a_rank_has_the_rows_of_its_coordinate(layout: Layout, rows: list[int]) -> None:
    coordinate = {"mp": 1, "cp": 1, "sep": 1}
    part = part_of(WHOLE, layout, coordinate, {"mp": 2, "cp": 2, "sep": 2})
    assert np.array_equal(part, WHOLE[rows])


def test_all_ranks_parts_make_the_whole() -> None:
    degrees = {"mp": 2}
    for layout in layouts(WHOLE.shape, (4, 6), degrees):
        whole = np.zeros_like(WHOLE)
        for rank in range(2):
            part = part_of(WHOLE, layout, {"mp": rank}, degrees)
            put_part(whole, part, layout, {"mp": rank}, degrees)
        assert np.array_equal(whole, WHOLE)


def test_shapes_that_no_degree_explains_are_no_parts() -> None:
    assert not list(layouts((8, 6), (3, 6), {"mp": 2}))
    assert not list(layouts((8, 6), (8,), {"mp": 2}))
    assert list(layouts((8, 6), (8, 6), {"mp": 2})) == [()]
