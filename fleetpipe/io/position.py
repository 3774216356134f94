"""Tracks, saves and restores the position of a loader in its data.

``SampledBatches`` does so over a batch sampler. Workers and threads load ahead of the training. So
the sampler's position after each batch waits in a queue until the training has taken the batch, and
then becomes the loader's position. ``SequentialBatches`` is for data without indices, which can
only be read from the start: to continue, the earlier batches are read again and dropped, with the
random states at the begin of the pass. A position that was saved for other data is refused; the
error names the difference.
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

_SEQUENTIAL_LOADER = "DataLoader over data without numbers"

_FIELDS = {"seed": int, "sampler": dict}


def checked_fields(state: Any, kinds: Mapping[str, type], owner: str) -> dict[str, Any]:
    """Checks the types of the fields of a saved position, and returns the fields by name.

    Args:
        state: The saved position.
        kinds: The type of each field; an int is at least 0.
        owner: The name of the class that has such positions, for errors.

    Raises:
        CheckpointError: A field is missing, unknown or of another type.
    """
    values = dict(state) if isinstance(state, Mapping) else {}
    wrong = [name for name, kind in kinds.items() if type(values.get(name)) is not kind]
    numbers = [name for name, kind in kinds.items() if kind is int and name not in wrong]
    for name in [*wrong, *[name for name in numbers if values[name] < 0]]:
        raise foreign_position_error(
            owner, f"{name}: {kinds[name].__name__}", f"{name}={values.get(name)!r}"
        )
    if unknown := sorted(map(str, values.keys() - kinds.keys())):
        raise foreign_position_error(
            owner, f"nothing but {', '.join(kinds)}", f"{', '.join(unknown)} as well"
        )
    return values


def require_same_data(name: str, current: object, saved: object, owner: str, fix: str) -> None:
    """Raises a CheckpointError if a position was saved for other data, or data in another order.

    Args:
        name: The name of a number that depends on the data or their order.
        current: The number in this run.
        saved: The number in the run that saved.
        owner: The name of the class that has such positions, for the error.
        fix: What to do, for the error.
    """
    if current != saved:
        raise CheckpointError(
            f"the saved position of the {owner} belongs to other data or another order of them",
            expected=f"{name}={current}, as in this run",
            got=f"{name}={saved}",
            fix=fix,
        )


def foreign_position_error(owner: str, expected: str, got: str) -> CheckpointError:
    """Returns the error for a position that another kind of sampler or loader saved.

    Args:
        owner: The name of the class into which the position was restored.
        expected: What a position of this class has, in words.
        got: What the saved position has, in words.
    """
    return CheckpointError(
        f"this is no saved position of a {owner}",
        expected=expected,
        got=got,
        fix=f"give what state_dict() of a {owner} returned",
    )


class Pass:
    """The random states of one pass over data without indices, which a resumed run begins again.

    NumPy's and Python's generators shuffle the data and seed workers.

    Attributes:
        begun: The generators' states at the begin of the pass, as JSON values; None before that.
    """

    def __init__(self) -> None:
        self.begun: Any = None

    @contextmanager
    def states_at_begin(self, taken: int, by_thread: bool) -> Iterator[None]:
        """In this context, begins a pass with the random states of the pass's begin.

        The context must load, and drop, the batches that the training has taken before.

        Args:
            taken: The number of these batches; 0 for a new pass, which begins with the current
                states.
            by_thread: Whether a thread of this process loads the samples: then random numbers
                continue after those of the dropped batches, else from the states before.
        """
        states_before = python_states()
        if taken and self.begun is not None:
            set_python_states(self.begun)
        self.begun = python_states()
        yield
        if taken and not by_thread:
            set_python_states(states_before)


class IterableWrapper(paddle.io.IterableDataset):  # type: ignore[type-arg]  # 2.6.2 takes no argument
    """Makes one of Paddle's datasets of any iterable."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the data, from the begin unless the data are an iterator."""
        return iter(self._data)


class SequentialBatches:
    """The position in batches that can only be read in order: how many the training has taken.

    Attributes:
        epoch: The epoch that is being read, or comes next.
        random_of_pass: The random states at the begin of the current pass.
    """

    def __init__(self, data: object, facts: Mapping[str, int]) -> None:
        """Starts at the first batch of epoch 0.

        Args:
            data: The source of the batches; an iterator, such as a generator, can be read only
                once.
            facts: Numbers, by name, on which the order of the batches depends; a saved position
                must have the same.
        """
        self._data = data
        self._facts = dict(facts)
        self.random_of_pass = Pass()
        #: Whether any pass has begun.
        self._was_read = False
        #: Whether the pass of the current epoch has begun.
        self._begun = False
        self._taken = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, which starts at its begin or a restored position."""
        if self._begun or require_whole("epoch", epoch, 0) != self.epoch:
            self.epoch, self._taken, self._begun = require_whole("epoch", epoch, 0), 0, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch that the training took."""
        return {"epoch": self.epoch, "batches": self._taken, **self._facts}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass continue at a saved position.

        Raises:
            CheckpointError: The position is invalid, or was saved for other data.
        """
        kinds = dict.fromkeys(("epoch", "batches", *self._facts), int)
        saved = checked_fields(state, kinds, _SEQUENTIAL_LOADER)
        fix = "go on with as many as the run had that saved, or give the data a length and numbers"
        for name, value in self._facts.items():
            require_same_data(name, value, saved[name], _SEQUENTIAL_LOADER, fix)
        self.epoch, self._taken, self._begun = saved["epoch"], saved["batches"], False

    def read(self, begin: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yields the batches of a pass, and counts each when the training takes it.

        Args:
            begin: Starts a pass over the data, and returns its batches.

        Raises:
            CheckpointError: The data end before the restored position.
            StateError: The data are an iterator that was begun before.
        """
        if self._was_read and isinstance(self._data, Iterator):
            raise StateError(
                f"a {type(self._data).__name__} is read once, and was begun before",
                fix="give the loader a list, or an object whose __iter__ begins anew each time",
            )
        self._was_read = True
        if self._begun:
            self.set_epoch(self.epoch + 1)
        self._begun = True
        by_thread = not self._facts.get("workers")
        with self.random_of_pass.states_at_begin(self._taken, by_thread):
            batches, missing = iter(begin()), object()
            for number in range(self._taken):
                if next(batches, missing) is missing:
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
    """A batch sampler whose position a loader can save, such as ``DistributedBatchSampler``.

    Attributes:
        epoch: The epoch that is being read, or comes next.
    """

    epoch: int

    def __iter__(self) -> Iterator[Sequence[int]]:
        """Yields each batch's indices in the next epoch, or from a restored position on."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next iteration reads."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch that was handed out, as JSON values."""

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position; an error changes nothing."""


class SampledBatches:
    """The position in a batch sampler's batches: after the last batch that the training took.

    It is also the batch sampler of the inner loader, which gets keys of samples in place of
    indices.
    """

    def __init__(self, sampler: ResumableSampler, seed: int) -> None:
        self._sampler = sampler
        vars(sampler)["read_ahead"] = True  # of a sampler of the script's own, too
        self._seed = seed
        #: The sampler's position after each batch that was drawn and not yet taken.
        self._ahead: deque[dict[str, Any]] = deque()
        #: The sampler's position after the last taken batch; None if it is its present one.
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
        """Makes the next pass continue at a saved position.

        Raises:
            CheckpointError: The position is invalid, or was saved for other data.
        """
        saved = checked_fields(state, _FIELDS, "DataLoader over a batch sampler")
        self._sampler.set_state_dict(saved["sampler"])
        self._seed = saved["seed"]
        self._state = None

    def __iter__(self) -> Iterator[list[Key]]:
        """Starts a pass, and forgets the batches drawn for an earlier one; the loader calls it."""
        self._state = self._sampler.state_dict()
        self._ahead = deque()
        return self._draw(iter(self._sampler), self._ahead)

    def _draw(
        self, batches: Iterator[Sequence[int]], ahead: deque[dict[str, Any]]
    ) -> Iterator[list[Key]]:
        """Yields the keys of each batch's samples; ``ahead`` gets the position after the batch."""
        for batch in batches:
            ahead.append(self._sampler.state_dict())
            yield [Key(self._seed, self._sampler.epoch, index) for index in batch]

    def read(self, begin: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yields the batches of a pass, and moves the position when the training takes a batch.

        Args:
            begin: Starts a pass of the inner loader, and returns its batches.
        """
        batches = iter(begin())
        ahead = self._ahead
        with closing_iterator(batches):
            for batch in batches:
                self._state = ahead.popleft()
                yield batch
