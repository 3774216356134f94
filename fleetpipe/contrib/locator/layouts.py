"""Finds the part of a whole tensor that a rank has, from both shapes and its coordinate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

#: Axes along which ranks hold parts of one tensor, and those that split one together.
_SPLITTING = (
    *(("mp",), ("sep",), ("cp",), ("ep",), ("sharding",), ("dp",)),
    *(("sep", "mp"), ("cp", "mp"), ("cp", "sep"), ("sep", "cp"), ("cp", "sep", "mp")),
)
#: Of fused matrices each part is split: that of q, k and v, of gate and up, or of four gates.
FUSED = (1, 3, 2, 4)


class DimensionCut(NamedTuple):
    """The split of one dimension of a tensor.

    Attributes:
        dimension: The dimension of the tensor.
        axes: The axes of the mesh.
        parts: The number of parts of the dimension, each of which is split.
        zigzag: Whether a rank of the first axis has one piece from the front and one from the
            back, which the other axes split.
    """

    dimension: int
    axes: tuple[str, ...]
    parts: int = 1
    zigzag: bool = False

    def indices(
        self, size: int, coordinate: Mapping[str, int], degrees: Mapping[str, int]
    ) -> np.ndarray:
        """Returns the indices along the dimension that a rank has of ``size``."""
        axes, here = self.axes, np.arange(size)
        if self.zigzag:
            ranks, number = degrees[axes[0]], coordinate.get(axes[0], 0)
            pieces = here.reshape(2 * ranks, -1)
            here, axes = pieces[[number, 2 * ranks - 1 - number]].reshape(-1), axes[1:]
        place, ranks = 0, 1
        for axis in axes:
            place = place * degrees[axis] + coordinate.get(axis, 0)
            ranks *= degrees[axis]
        return here.reshape(self.parts, ranks, -1)[:, place].reshape(-1)


#: How a tensor is split, dimension by dimension; () where a rank has it whole.
Layout = tuple[DimensionCut, ...]


def layouts(
    whole: Sequence[int], here: Sequence[int], degrees: Mapping[str, int]
) -> Iterator[Layout]:
    """Yields the possible splits of a tensor of which a rank has a part, likely ones first.

    Args:
        whole: The shape of the whole tensor.
        here: The shape of the rank's part.
        degrees: The degrees of the axes that are split.
    """
    if len(whole) != len(here):
        return
    ways = [
        list(_cuts(dimension, size, part, degrees))
        for dimension, (size, part) in enumerate(zip(whole, here))
        if size != part
    ]
    # One axis splits one dimension; of matrices that are fused there are fewer than of others.
    apart = [way for way in itertools.product(*ways) if _disjoint(way)]
    yield from sorted(apart, key=lambda way: sum(cut.parts > 1 for cut in way))[:24]


def _disjoint(way: Layout) -> bool:
    axes = [axis for cut in way for axis in cut.axes]
    return len(axes) == len({*axes})


def _cuts(
    dimension: int, size: int, part: int, degrees: Mapping[str, int]
) -> Iterator[DimensionCut]:
    for axes in _SPLITTING:
        ranks = int(np.prod([degrees.get(axis, 1) for axis in axes]))
        if ranks == 1 or part * ranks != size or not all(degrees.get(a, 1) > 1 for a in axes):
            continue
        if axes[0] == "cp" and size % (2 * degrees["cp"]) == 0:
            yield DimensionCut(dimension, axes, zigzag=True)
        for parts in FUSED:
            if part % parts == 0:
                yield DimensionCut(dimension, axes, parts)


def part_of(
    whole: np.ndarray, layout: Layout, coordinate: Mapping[str, int], degrees: Mapping[str, int]
) -> np.ndarray:
    """Returns a rank's part of a tensor."""
    for cut in layout:
        size = whole.shape[cut.dimension]
        whole = whole.take(cut.indices(size, coordinate, degrees), axis=cut.dimension)
    return whole


def parts_of(
    whole: np.ndarray,
    shape: tuple[int, ...],
    coordinate: Mapping[str, int],
    degrees: Mapping[str, int],
) -> Iterator[np.ndarray]:
    """Yields the possible parts of a tensor that a rank has, by the shape of its part."""
    for layout in layouts(whole.shape, shape, degrees):
        yield part_of(whole, layout, coordinate, degrees)


def put_part(
    whole: np.ndarray,
    part: np.ndarray,
    layout: Layout,
    coordinate: Mapping[str, int],
    degrees: Mapping[str, int],
) -> None:
    """Writes a rank's part into its places of the whole tensor."""
    places: list[np.ndarray] = [np.arange(size) for size in whole.shape]
    for cut in layout:
        places[cut.dimension] = cut.indices(whole.shape[cut.dimension], coordinate, degrees)
    whole[np.ix_(*places)] = part
