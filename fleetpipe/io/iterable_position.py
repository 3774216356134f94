"""The position of a loader over data that come one after another: a number of batches.

Such data cannot be entered in the middle. Whoever goes on in them takes the batches up to there
once more, and drops them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable

from fleetpipe.errors import CheckpointError, StateError
from fleetpipe.io.saved_position import fields, require_same, whole
from fleetpipe.paddle_api import paddle

_OF = "DataLoader over data without numbers"


class Iterated(paddle.io.IterableDataset):  # type: ignore[type-arg]  # 2.6.2 takes no argument
    """Any iterable as a dataset of Paddle's."""

    def __init__(self, data: Iterable[Any]) -> None:
        """Takes the iterable."""
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        """Begins the iterable, anew where it can."""
        return iter(self._data)


class BatchesInTurn:
    """How many batches of the data the training has taken."""

    def __init__(self, data: object, facts: Mapping[str, int]) -> None:
        """Begins at the first batch of epoch 0.

        Args:
            data: Where the batches come from: an iterator, such as a generator, is read once.
            facts: What decides which batch is the n-th, beside the data: numbers by name.
        """
        self._data = data
        self._facts = dict(facts)
        self._read = False
        self._begun = False
        self._taken = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Says which number the next pass has: from its begin, or from a restored position."""
        if self._begun or whole("epoch", epoch) != self.epoch:
            self.epoch, self._taken, self._begun = whole("epoch", epoch), 0, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batch that the training took last."""
        return {"epoch": self.epoch, "batches": self._taken, **self._facts}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next pass go on at a saved position."""
        kinds = dict.fromkeys(("epoch", "batches", *self._facts), int)
        saved = fields(state, kinds, _OF)
        fix = "go on with as many as the run had that saved, or give the data a length and numbers"
        for name, own in self._facts.items():
            require_same(name, own, saved[name], _OF, fix)
        self.epoch, self._taken, self._begun = saved["epoch"], saved["batches"], False

    def read(self, begin: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yields the batches of a pass, and counts each when the training takes it.

        Args:
            begin: Begins to load the data.

        Raises:
            CheckpointError: The data end before the restored position.
            StateError: They are an iterator that was begun before.
        """
        if self._read and isinstance(self._data, Iterator):
            raise StateError(
                f"a {type(self._data).__name__} is read once, and was begun before",
                fix="give the loader a list, or an object whose __iter__ begins anew each time",
            )
        self._read = True
        if self._begun:
            self.set_epoch(self.epoch + 1)
        self._begun = True
        batches = iter(begin())
        for number in range(self._taken):
            if next(batches, self) is self:
                raise CheckpointError(
                    f"the data end after {number} batches",
                    expected=f"{self._taken}, which the run that saved had taken",
                    fix="give the loader the data of that run, or begin anew",
                )
        for batch in batches:
            self._taken += 1
            yield batch
