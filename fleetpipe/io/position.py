"""The position of a loader, over a batch sampler and over data that can only be iterated.

Workers and threads load ahead of the training. So the sampler's position after each batch waits in
a queue until the training has taken the batch, and then becomes the loader's position. Data without
indices can only be read from the start: to continue, the earlier batches are read again and
dropped, with the random states at the begin of the pass. A position that was saved for other data
is refused; the error names the difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from fleetpipe.errors import CheckpointError, StateError, require_whole
from fleetpipe.io.sample_streams import Key
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.loading import closing_iterator
from fleetpipe.paddle_api.random import python_states, set_python_states

_OF = "DataLoader over data without numbers"

_FIELDS = {"seed": int, "sampler": dict}


def fields(state: Any, kinds: Mapping[str, type], of: str) -> dict[str, Any]:
    """Returns the fields of a saved position after checking their types; numbers are at least 0.

    Raises:
        CheckpointError: A field is missing, foreign or of another type.
    """
    values = dict(state) if isinstance(state, Mapping) else {}
    wrong = [name for name, kind in kinds.items() if type(values.get(name)) is not kind]
    numbers = [name for name, kind in kinds.items() if kind is int and name not in wrong]
    for name in [*wrong, *[name for name in numbers if values[name] < 0]]:
        raise foreign(of, f"{name}: {kinds[name].__name__}", f"{name}={values.get(name)!r}")
    if unknown := sorted(map(str, values.keys() - kinds.keys())):
        raise foreign(of, f"nothing but {', '.join(kinds)}", f"{', '.join(unknown)} as well")
    return values


def require_same(name: str, here: object, saved: object, of: str, fix: str) -> None:
    """Checks that a position was saved for the same data."""
    if here != saved:
        raise CheckpointError(
            f"the saved position of the {of} belongs to other data or another order of them",
            expected=f"{name}={here}, as in this run",
            got=f"{name}={saved}",
            fix=fix,
        )


def foreign(of: str, expected: str, got: str) -> CheckpointError:
    """Returns the error for a position that another kind of sampler or loader saved."""
    return CheckpointError(
        f"this is no saved position of a {of}",
        expected=expected,
        got=got,
        fix=f"give what state_dict() of a {of} returned",
    )


class Pass:
    """One pass over data without indices, which a resumed run begins again.

    NumPy's and Python's generators shuffle the data and seed workers.

    Attributes:
        begun: The generators' states at the begin of the pass, as JSON values; None before it.
    """

    def __init__(self) -> None:
        self.begun: Any = None

    @contextmanager
    def again(self, taken: int, by_thread: bool) -> Iterator[None]:
        """Sets random states for a context in which a pass begins and taken batches are dropped.

        Args:
            taken: The number of these batches; 0 for a new pass.
            by_thread: Whether a thread of this process loads the samples: then random numbers
                continue after those of the dropped batches, else from the restored states.
        """
        restored = python_states()
        if taken and self.begun is not None:
            set_python_states(self.begun)
        self.begun = python_states()
        yield
        if taken and not by_thread:
            set_python_states(restored)


class Iterated(paddle.io.IterableDataset):  # type: ignore[type-arg]  # 2.6.2 takes no argument
    """Turns any iterable into one of Paddle's datasets."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        """Starts the iterable, from its begin if it can be restarted."""
        return iter(self._data)


class BatchesInTurn:
    """Batches that can only be read in order, and how many the training has taken."""

    def __init__(self, data: object, facts: Mapping[str, int]) -> None:
        """Starts at the first batch of epoch 0.

        Args:
            data: The source of the batches; an iterator, such as a generator, can be read only
                once.
            facts: The numbers, by name, that decide with the data which batch is the n-th.
        """
        self._data = data
        self._facts = dict(facts)
        self.random_of_pass = Pass()
        self._read = False
        self._begun = False
        self._taken = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, from its begin or from a restored position."""
        if self._begun or require_whole("epoch", epoch, 0) != self.epoch:
            self.epoch, self._taken, self._begun = require_whole("epoch", epoch, 0), 0, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch that the training took."""
        return {"epoch": self.epoch, "batches": self._taken, **self._facts}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass continue at a saved position."""
        kinds = dict.fromkeys(("epoch", "batches", *self._facts), int)
        saved = fields(state, kinds, _OF)
        fix = "go on with as many as the run had that saved, or give the data a length and numbers"
        for name, value in self._facts.items():
            require_same(name, value, saved[name], _OF, fix)
        self.epoch, self._taken, self._begun = saved["epoch"], saved["batches"], False

    def read(self, begin: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yields the batches of a pass, and counts each when the training takes it.

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
        with self.random_of_pass.again(self._taken, by_thread=not self._facts.get("workers")):
            batches = iter(begin())
            for number in range(self._taken):
                if next(batches, self) is self:
                    raise CheckpointError(
                        f"the data end after {number} batches",
                        expected=f"{self._taken}, which the run that saved had taken",
                        fix="give the loader the data of that run, or begin anew",
                    )
        with closing_iterator(batches):
            for batch in batches:
                self._taken += 1
                yield batch


@runtime_checkable
class ResumableSampler(Protocol):
    """A batch sampler whose position a loader can save: see ``DistributedBatchSampler``.

    Attributes:
        epoch: The epoch that is being read, or comes next.
    """

    epoch: int

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Yields the indices of batches of the next epoch, or from a restored position on."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next iteration reads."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch that was handed out, as JSON values."""

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position, or raises and changes nothing."""


class DrawnBatches:
    """A resumable batch sampler that counts the batches which the training has taken."""

    def __init__(self, sampler: ResumableSampler, seed: int) -> None:
        self._sampler = sampler
        vars(sampler)["read_ahead"] = True  # of a sampler of the script's own, too
        self._seed = seed
        self._ahead: deque[dict[str, Any]] = deque()
        self._state: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or comes next."""
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next pass reads."""
        self._sampler.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch that the training took."""
        state = self._sampler.state_dict() if self._state is None else self._state
        return {"seed": self._seed, "sampler": state}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass continue at a saved position."""
        saved = fields(state, _FIELDS, "DataLoader over a batch sampler")
        self._sampler.set_state_dict(saved["sampler"])
        self._seed = saved["seed"]
        self._state = None

    def __iter__(self) -> Iterator[list[Key]]:
        """Starts a pass and drops the batches drawn for an earlier one."""
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
        """Yields the batches of a pass, and counts each when the training takes it."""
        batches = iter(begin())
        ahead = self._ahead
        with closing_iterator(batches):
            for batch in batches:
                self._state = ahead.popleft()
                yield batch
