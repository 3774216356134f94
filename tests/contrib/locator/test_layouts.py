"""Which part of a whole tensor a rank has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fleetpipe.contrib.locator.layouts import DimensionCut, Layout, WholeTensors, layouts, places_of
from fleetpipe.contrib.locator.record import Meaning, RankTensors, Record

WHOLE = np.arange(8 * 6).reshape(8, 6)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ((DimensionCut(0, ("mp",)),), [4, 5, 6, 7]),
        ((DimensionCut(0, ("mp",), parts=2),), [2, 3, 6, 7]),
        ((DimensionCut(0, ("cp",), zigzag=True),), [2, 3, 4, 5]),
        ((DimensionCut(0, ("sep", "mp")),), [6, 7]),
        ((DimensionCut(0, ("cp", "sep"), zigzag=True),), [4, 5]),
    ],
)
def test_a_rank_has_the_rows_of_its_coordinate(layout: Layout, rows: list[int]) -> None:
    coordinate = {"mp": 1, "cp": 1, "sep": 1}
    places = places_of(WHOLE.shape, layout, coordinate, {"mp": 2, "cp": 2, "sep": 2})
    assert np.array_equal(WHOLE[places], WHOLE[rows])


def test_all_ranks_parts_make_the_whole() -> None:
    degrees = {"mp": 2}
    for layout in layouts(WHOLE.shape, (4, 6), degrees):
        whole = np.zeros_like(WHOLE)
        for rank in range(2):
            places = places_of(WHOLE.shape, layout, {"mp": rank}, degrees)
            whole[places] = WHOLE[places]
        assert np.array_equal(whole, WHOLE)


def test_shapes_that_no_degree_explains_are_no_parts() -> None:
    assert not list(layouts((8, 6), (3, 6), {"mp": 2}))
    assert not list(layouts((8, 6), (8,), {"mp": 2}))
    assert list(layouts((8, 6), (8, 6), {"mp": 2})) == [()]


def test_the_way_in_which_two_axes_split_two_dimensions_is_among_those_that_are_tried() -> None:
    degrees = {"mp": 2, "cp": 2}
    ways = list(layouts((24, 2, 48), (12, 2, 24), degrees))
    assert (DimensionCut(0, ("cp",), zigzag=True), DimensionCut(2, ("mp",))) in ways


@pytest.mark.parametrize(
    ("zigzag", "tokens"),
    # The last fit pieces of both orders.
    [(False, range(8)), (True, range(8)), (True, [4, 16, 2, 8, 14, 14, 14, 14])],
)
def test_masks_of_parts_are_joined_in_the_order_of_the_samples(
    zigzag: bool, tokens: Sequence[int]
) -> None:
    """Members along mp have the same; along cp pieces that the samples alone put in order."""
    degrees, cut = {"mp": 2, "cp": 2}, DimensionCut(1, ("cp",), zigzag=zigzag)
    drawn = np.random.default_rng(3).random([2, 8]) < 0.5
    data, kept = Meaning(0, "data", "", 0, "input"), Meaning(0, "forward", "drop", 0, "mask")
    twin, ranks = RankTensors(0, {}), []
    twin.tensors[data] = np.array([tokens, tokens])
    for number in range(4):
        here = RankTensors(number, {"mp": number % 2, "cp": number // 2})
        for place, whole in ((data, twin.tensors[data]), (kept, drawn)):
            here.tensors[place] = whole[places_of(whole.shape, (cut,), here.coordinate, degrees)]
        ranks.append(here)
    mask = WholeTensors(Record(ranks, degrees)).mask(kept, (2, 8), twin)
    assert mask is not None
    assert np.array_equal(mask, drawn)
