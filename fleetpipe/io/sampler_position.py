"""The position of a loader over a batch sampler: noted beside each batch when it is drawn.

Workers and threads load ahead of the training. So the sampler's position after each batch waits in
a queue until the training has taken the batch, and is the loader's from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable, Protocol, runtime_checkable

from fleetpipe.io.sample_streams import Key
from fleetpipe.io.saved_position import fields

_FIELDS = {"seed": int, "sampler": dict}


@runtime_checkable
class ResumableSampler(Protocol):
    """What a batch sampler has whose position a loader can save: see ``DistributedBatchSampler``.

    Attributes:
        epoch: The epoch that is read, or comes next.
    """

    epoch: int

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Yields the indices of batches: of the next epoch, or on from a restored position."""

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration reads."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batch that was handed out last; JSON can hold it."""

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iteration go on at a saved position, or raises and changes nothing."""


class DrawnBatches:
    """A resumable batch sampler, as Paddle's loader draws from it, and how far the training is."""

    def __init__(self, sampler: ResumableSampler, seed: int) -> None:
        """Begins at the sampler's position.

        Args:
            sampler: Gives the indices of each batch.
            seed: That of the samples' random numbers.
        """
        self._sampler = sampler
        self._seed = seed
        self._ahead: deque[dict[str, Any]] = deque()
        self._state: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is read, or comes next."""
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next pass reads."""
        self._sampler.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batch that the training took last."""
        state = self._sampler.state_dict() if self._state is None else self._state
        return {"seed": self._seed, "sampler": state}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next pass go on at a saved position."""
        saved = fields(state, _FIELDS, "DataLoader over a batch sampler")
        self._sampler.set_state_dict(saved["sampler"])
        self._seed = saved["seed"]
        self._state = None

    def __iter__(self) -> Iterator[list[Key]]:
        """Begins a pass: what was drawn for an earlier one is forgotten."""
        self._state = self._sampler.state_dict()
        self._ahead = deque()
        return self._draw(iter(self._sampler), self._ahead)

    def _draw(
        self, batches: Iterator[Sequence[int]], ahead: deque[dict[str, Any]]
    ) -> Iterator[list[Key]]:
        for batch in batches:
            ahead.append(self._sampler.state_dict())
            yield [Key(self._seed, self._sampler.epoch, index) for index in batch]

    def read(self, begin: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yields the batches of a pass, and counts each when the training takes it.

        Args:
            begin: Begins to load what this draws.
        """
        batches = iter(begin())
        ahead = self._ahead
        for batch in batches:
            self._state = ahead.popleft()
            yield batch
