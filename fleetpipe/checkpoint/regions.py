"""Which bytes of a whole tensor a rank holds: a part of one axis, or all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
