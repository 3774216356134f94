"""How much a process gives to other members of groups, while somebody counts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Traffic:
    """What was given away.

    Attributes:
        exchanges: How often: an all_to_all, or a reduce_scatter.
        nbytes: Bytes for other members.
    """

    exchanges: int = 0
    nbytes: int = 0

    def add(self, parts: Iterable[Any]) -> None:
        """Counts an exchange of some tensors, each for another member."""
        # Late: a mesh is looked at where no Paddle is, too.
        from fleetpipe.paddle_api.tensor import tensor_bytes

        self.exchanges += 1
        self.nbytes += sum(map(tensor_bytes, parts))


_counting: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Within it exchanges are counted."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def note(parts: Iterable[Any]) -> None:
    """Tells those who count of an exchange; see :meth:`Traffic.add`."""
    for traffic in _counting:
        traffic.add(parts)
