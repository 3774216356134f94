"""Which bytes of a whole tensor a rank holds: a part of one axis, or all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """The part of a tensor that a rank holds.

    Attributes:
        axis: The axis that is cut.
        start: The first place along it.
        stop: The place after the last.
        size: Places of the whole tensor along it.
    """

    axis: int
    start: int
    stop: int
    size: int

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole tensor of which ``shape`` is the part's."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part of a whole tensor of ``shape``."""
        return (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])


class Run(NamedTuple):
    """Neighbouring bytes: where they begin in the whole tensor, in the part, and how many."""

    whole: int
    part: int
    nbytes: int


def runs(shape: tuple[int, ...], itemsize: int, cut: Cut | None) -> Iterator[Run]:
    """Yields the bytes of a part in their order.

    Args:
        shape: Of the whole tensor.
        itemsize: Bytes of one element.
        cut: The part; None for the whole tensor.
    """
    if cut is None:
        yield Run(0, 0, math.prod(shape) * itemsize)
        return
    inner = math.prod(shape[cut.axis + 1 :]) * itemsize
    count = (cut.stop - cut.start) * inner
    for row in range(math.prod(shape[: cut.axis])):
        yield Run((row * cut.size + cut.start) * inner, row * count, count)


def is_whole(cuts: Sequence[Cut | None], shape: tuple[int, ...]) -> bool:
    """Whether parts, in their order, are together the whole of a tensor, and none of it twice."""
    if list(cuts) == [None]:
        return True
    end, axes = 0, set()
    for cut in cuts:
        if cut is None or not 0 <= cut.axis < len(shape) or cut.size != shape[cut.axis]:
            return False
        if cut.start != end or cut.stop < end:
            return False
        end = cut.stop
        axes.add(cut.axis)
    return len(axes) == 1 and end == shape[axes.pop()]
