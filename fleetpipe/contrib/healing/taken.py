"""The items of a batch that a script takes one by one, which can be taken once more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleetpipe.checkpoint.contents.training_state import random_states, set_random_states


class Taken:
    """An iterator whose items can be taken once more, with what was drawn to make them."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._taken: list[tuple[Any, Any]] = []
        self._next = 0

    def __iter__(self) -> Taken:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._taken):
            self._taken.append((next(self._items), random_states()))
        else:
            set_random_states(self._taken[self._next][1])
        self._next += 1
        return self._taken[self._next - 1][0]

    def begin_anew(self) -> None:
        """Makes the next item the first one that was taken."""
        self._next = 0
