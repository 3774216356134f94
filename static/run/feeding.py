"""Cuts a user's feed into micro-batches, and joins the fetched values.

A mini-batch is fed as a whole, or taken from an iterator over micro-batches. The values of a fetch
in all micro-batches are joined on the rank that computes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Optimizer, Place, ScopeTensor, Variable
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import DenseTensor, lengths_of
from fleetpipe.static.cut import GraphReader, Split
from fleetpipe.static.graph import Declared, Item

#: A digest reads all numbers of an array up to this size, and about so many of a larger one.
_MOST_DIGESTED = 4096


class FedBatch:
    """The feed of one run, by micro-batch.

    An array is cut along its first axis if it has accumulate_steps times the declared rows, or if
    any number of rows is declared. An array of exactly the declared shape is a constant: every
    micro-batch gets the whole array.
    """

    def __init__(
        self,
        feed: object,
        declared: Mapping[str, Declared],
        micro_batches: int,
        rows: int,
        place: Place,
        copied: bool = False,
    ) -> None:
        """Checks and cuts a feed.

        Args:
            feed: Arrays or tensors by name, or a list with one such dict.
            declared: The program's declaration of each feed, by name.
            micro_batches: The number of micro-batches of a batch, m.
            rows: The number of rows of a micro-batch.
            place: The device of the micro-batches.
            copied: Whether to copy arrays, which the caller may change before their last use.

        Raises:
            ConfigError: A feed does not fit the micro-batches.
            UsageError: A feed is not an array, or has another dtype than the program's.
        """
        self._place = place
        #: The array of each micro-batch, by feed.
        self._arrays: dict[str, Sequence[np.ndarray]] = {}
        for name, value in _as_dict(feed).items():
            if name in declared:
                array = _checked_array(name, value, declared[name])
                array = array.copy() if copied else array
                self._arrays[name] = _split_rows(name, array, declared[name], micro_batches, rows)
        self._refuse_labels_of_one_micro_batch(rows)

    def _refuse_labels_of_one_micro_batch(self, rows: int) -> None:
        """Refuses integers with the rows of one micro-batch, if another feed is cut into rows.

        They are labels of a batch that is too short, not a constant for all micro-batches.
        """
        constants = {name for name, arrays in self._arrays.items() if arrays[0] is arrays[-1]}
        if len(constants) == len(self._arrays):
            return
        for name in sorted(constants):
            array = self._arrays[name][0]
            if array.dtype.kind in "iu" and array.shape in ((rows,), (rows, 1)):
                raise ConfigError(
                    f"the feed {name!r} has the rows of one micro-batch, and others have those of "
                    "all",
                    got=f"shape {list(array.shape)}",
                    fix="feed the whole mini-batch; declare a constant of this length as [1, n]",
                )

    def require(self, names: Iterable[str]) -> None:
        """Refuses a batch that lacks some of the feeds ``names`` of this process's stages."""
        missing = sorted(set(names) - set(self._arrays))
        if missing:
            raise ConfigError(
                f"this rank's stages need {', '.join(map(repr, missing))}, which was not fed",
                got=f"a feed of {', '.join(map(repr, sorted(self._arrays))) or 'nothing'}",
                fix="feed the whole mini-batch on every rank alike",
            )

    def put(self, name: str, micro_batch: int, tensor: ScopeTensor) -> None:
        """Copies the feed ``name`` of a micro-batch into a dense tensor."""
        tensor.set(self._arrays[name][micro_batch], self._place)

    def digest(self) -> int:
        """Returns a CRC-32 of all feeds; of large arrays it reads numbers at equal distances."""
        digest = 0
        for _, arrays in sorted(self._arrays.items()):
            for array in arrays:
                numbers = array.reshape(-1)
                sample = numbers[:: 1 + numbers.size // _MOST_DIGESTED]
                digest = zlib.crc32(np.ascontiguousarray(sample).tobytes(), digest)
        return digest


class ProgramBatch:
    """A mini-batch that this process can train on repeatedly.

    Attributes:
        results: The fetched values of the last run.
    """

    def __init__(self, fed: FedBatch | None, run: Callable[[], list[np.ndarray | None]]) -> None:
        """Creates a batch.

        Args:
            fed: The feed of the batch; None at the end of the data.
            run: Trains on the batch, and returns the fetched values.
        """
        self._fed, self._run = fed, run
        self.results: list[np.ndarray | None] = []

    @property
    def digests(self) -> tuple[int | None, None]:
        """The digest of the feed (None at the end of the data), and None: labels are in the feed.

        Healing compares a batch by digests of inputs and labels.
        """
        return None if self._fed is None else self._fed.digest(), None

    def train(self, optimizer: Optimizer = None) -> None:
        """Trains on the batch, with the optimizer of the program. Collective over the job."""
        self.results = self._run()


def _as_dict(feed: object) -> Mapping[str, Any]:
    """Returns a feed as a dict; refuses any other type."""
    if isinstance(feed, (list, tuple)) and len(feed) == 1:
        feed = feed[0]
    if feed is None:
        return {}
    if isinstance(feed, Mapping):
        return feed
    raise UsageError(
        "feed must be a dict of arrays by name",
        got=f"{type(feed).__name__} of {len(feed)} entries"
        if isinstance(feed, (list, tuple))
        else type(feed).__name__,
        fix="feed={'x': array_of_the_whole_mini_batch, ..}; of dicts with a micro-batch each, "
        "give an iterator: feed=iter(dicts)",
    )


def _checked_array(name: str, value: object, declared: Declared) -> np.ndarray:
    """Returns a feed as an array; refuses another dtype than the declared one.

    Only Python numbers are converted to the declared dtype.
    """
    if isinstance(value, (paddle.Tensor, DenseTensor)):
        if lengths_of(value):
            raise UsageError(
                f"the feed {name!r} has sequences of several lengths in one tensor",
                got=f"a LoDTensor of lengths {lengths_of(value)}",
                fix="pad them to one length, and feed the lengths or a mask beside them",
            )
        array = np.array(value)
    elif isinstance(value, np.ndarray):
        array = value
    else:
        array = _from_numbers(name, value, declared)
    stored = "uint16" if declared.dtype == "bfloat16" else declared.dtype
    if array.dtype.name != stored:
        raise UsageError(
            f"the feed {name!r} has another dtype than its paddle.static.data",
            expected=declared.dtype,
            got=array.dtype.name,
            fix=f"feed {name!r} as array.astype({stored!r})",
        )
    return array


def _from_numbers(name: str, value: object, declared: Declared) -> np.ndarray:
    """Converts Python numbers to an array of the declared dtype."""
    try:
        return np.asarray(value, None if declared.dtype == "bfloat16" else declared.dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the feed {name!r} is no array of numbers",
            expected=f"an array or a tensor of {declared.dtype}",
            got=type(value).__name__,
            cause=str(error),
            fix=f"feed {name!r} as one array of the whole mini-batch",
        ) from error


def _split_rows(
    name: str, array: np.ndarray, declared: Declared, micro_batches: int, rows: int
) -> Sequence[np.ndarray]:
    """Returns the array of each micro-batch; refuses a shape that does not fit the declaration.

    Args:
        name: The feed, for error messages.
        array: The feed of the whole mini-batch; or of exactly the declared shape, for a constant
            that every micro-batch gets.
        declared: The feed's declaration.
        micro_batches: The number of micro-batches, m.
        rows: The number of rows of a micro-batch, if the declaration leaves it open.
    """
    shape = declared.shape
    is_exact = tuple(array.shape) == shape and all(size >= 0 for size in shape)
    if is_exact and not (shape and shape[0] == micro_batches * rows):
        return [array] * micro_batches
    expected = rows if not shape or shape[0] < 0 else shape[0]
    array_rows = array.shape[0] if array.ndim else 0
    fits = len(shape) == array.ndim and all(
        size in (-1, array_size) for size, array_size in zip(shape[1:], array.shape[1:])
    )
    if not shape or array_rows != micro_batches * expected or not fits:
        raise ConfigError(
            f"the feed {name!r} is not a mini-batch of accumulate_steps x micro_batch_size rows",
            expected=f"shape {[micro_batches * expected, *shape[1:]]}"
            f" ({micro_batches} x {expected} rows)",
            got=f"shape {list(array.shape)}",
            fix="change the batch, or strategy.pipeline_configs; drop an incomplete last batch",
        )
    return [array[index * expected : (index + 1) * expected] for index in range(micro_batches)]


def take_micro_batches(items: Iterator[Item | Sequence[Item]], count: int) -> Item | None:
    """Takes ``count`` micro-batches from an iterator, and joins them along the rows.

    Args:
        items: Yields micro-batches: dicts of arrays by name, or lists of the dicts of several
            loaders.
        count: The number of micro-batches of a mini-batch.

    Returns:
        The mini-batch; None if too few micro-batches are left. A last one with fewer rows is
        incomplete, and does not count.

    Raises:
        ConfigError: Micro-batches have different shapes.
    """
    taken: list[dict[str, np.ndarray]] = []
    while len(taken) < count:
        try:
            # Not by a for loop: its iter() would make a loader of Paddle begin another epoch.
            item = next(items)
        except StopIteration:
            return None
        micro_batch = merge_feeds([item]) if isinstance(item, Mapping) else merge_feeds(item)
        taken.append({name: np.asarray(value) for name, value in micro_batch.items()})
        if _row_counts(taken[-1]) < _row_counts(taken[0]):
            if next(items, None) is None:
                return None
            raise _unequal_shapes(taken, "drop those with other rows, or fill them up")
    try:
        return {name: np.concatenate([arrays[name] for arrays in taken]) for name in taken[0]}
    except (KeyError, ValueError) as error:
        raise _unequal_shapes(taken, "pad all micro-batches of a run to one length") from error


def _row_counts(item: Mapping[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Returns the first axis of each array's shape, in the order of the names."""
    return [item[name].shape[:1] for name in sorted(item)]


def _unequal_shapes(taken: Sequence[Mapping[str, np.ndarray]], fix: str) -> ConfigError:
    """Returns the error of micro-batches of different shapes in one mini-batch."""
    shapes = [{name: list(value.shape) for name, value in item.items()} for item in taken]
    return ConfigError(
        "the micro-batches of a run have the same shapes",
        got="; ".join(map(str, shapes)),
        fix=f"{fix}; a last one with fewer rows ends the data",
    )


def merge_feeds(dicts: object) -> Item:
    """Returns one dict of the arrays of a micro-batch, which several loaders may have given.

    Raises:
        UsageError: ``dicts`` is no list of dicts.
    """
    if not isinstance(dicts, (list, tuple)) or not all(isinstance(d, Mapping) for d in dicts):
        raise UsageError(
            "a micro-batch of an iterator is a dict of arrays by name",
            got=type(dicts).__name__,
            fix="for a paddle.io.DataLoader: feed_list=[..] and return_list=False",
        )
    return {name: array for arrays in dicts for name, array in arrays.items()}


class Fetch(NamedTuple):
    """An entry of ``fetch_list``.

    Attributes:
        name: The name of the value in messages.
        number: The number of the value.
        stage: The stage that computes it; None for a persistable variable.
        variable: The name of a persistable variable, else None.
        rows: Whether its first axis is that of the rows, even if it has one row.
    """

    name: str
    number: int
    stage: int | None
    variable: str | None
    rows: bool = False

    @classmethod
    def from_target(cls, target: Variable | str, reader: GraphReader, split: Split) -> Fetch:
        """Returns the entry for a value that the user fetches, or for its name.

        Raises:
            ConfigError: The program has no such value, or no stage computes it.
            UsageError: ``target`` is neither a value nor a name.
        """
        if not isinstance(target, str) and not hasattr(type(target), "name"):
            raise UsageError(
                "only values of the program can be fetched",
                got=type(target).__name__,
                fix="put values, or their names, into fetch_list",
            )
        label = _fetch_name(target)
        number = reader.number(target)
        if number is None:
            raise ConfigError(
                f"cannot fetch {label!r}: the program had no such value when it was minimized",
                fix="build everything that is fetched before minimize, each under a guard; "
                "gradients have no place in the program of a pipeline",
            )
        if number in split.graph.persistable:
            return cls(label, number, None, split.graph.names[number])
        stage = split.stage_of_value[number]
        if stage is None:
            raise ConfigError(
                f"cannot fetch {label!r}: it is fed or constant, or every stage has its own",
                cause="what stands under device_guard('gpu:all') belongs to no stage",
                fix="fetch a result of the network, made under a guard with a number",
            )
        return cls(label, number, stage, None, number in split.graph.rowwise)


def _fetch_name(target: Variable | str) -> str:
    """Returns the name of a value for messages."""
    if isinstance(target, str):
        return target
    # Under PIR most values have no name, and reading it raises an error.
    return str(target.name) if getattr(target, "has_name", True) else str(target)


def join_fetched(fetch: Fetch, values: Sequence[np.ndarray], how: str) -> np.ndarray:
    """Joins the values of all micro-batches into one result.

    Args:
        fetch: The entry of ``fetch_list``.
        values: An array for each micro-batch, in order.
        how: ``"mean"``: the mean of values with one element, in the order of the micro-batches and
            in their dtype (float64 for integers); values with rows are concatenated, as in the
            whole batch. ``"last"``: the value of the last micro-batch. ``"all"``: the values are
            stacked along a new first axis.

    Returns:
        The result that ``Executor.run`` returns for the entry.

    Raises:
        ConfigError: The values do not fit together.
    """
    if how == "last":
        return values[-1]
    if how == "mean" and values[0].size == 1 and not fetch.rows:
        floating = np.issubdtype(values[0].dtype, np.floating)
        shares = [value if floating else value.astype("float64") for value in values]
        total = shares[0] / shares[0].dtype.type(len(shares))
        for share in shares[1:]:
            # A sum of quotients, like the loss of a dynamic-graph pipeline.
            total = total + share / share.dtype.type(len(shares))
        return np.asarray(total)
    join = np.stack if how == "all" else np.concatenate
    try:
        return join(values)
    except ValueError as error:
        raise ConfigError(
            f"the values of {fetch.name!r} in the micro-batches do not fit together",
            got=f"shapes {[list(value.shape) for value in values]}",
            fix="fetch it with fleetpipe_configs = {'fetch': 'last'}",
        ) from error
