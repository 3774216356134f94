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
_MOST_NUMBERS = 4096


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
            place: The device of the parts.
            copied: Whether to copy arrays, which the caller may change before their last use.

        Raises:
            ConfigError: A feed does not fit the micro-batches.
            UsageError: A feed is not an array, or has another dtype than the program's.
        """
        self._place = place
        self._parts: dict[str, Sequence[np.ndarray]] = {}
        for name, value in _as_dict(feed).items():
            if name in declared:
                array = _array(name, value, declared[name])
                array = array.copy() if copied else array
                self._parts[name] = _cut(name, array, declared[name], micro_batches, rows)
        self._refuse_labels_of_one(rows)

    def _refuse_labels_of_one(self, rows: int) -> None:
        """Refuses labels of one micro-batch if other feeds are cut: labels are no constant."""
        whole = {name for name, parts in self._parts.items() if parts[0] is parts[-1]}
        for name in sorted(whole) if len(whole) < len(self._parts) else ():
            part = self._parts[name][0]
            if part.dtype.kind in "iu" and part.shape in ((rows,), (rows, 1)):
                raise ConfigError(
                    f"the feed {name!r} has the rows of one micro-batch, and others have those of "
                    "all",
                    got=f"shape {list(part.shape)}",
                    fix="feed the whole mini-batch; declare a constant of this length as [1, n]",
                )

    def require(self, names: Iterable[str]) -> None:
        """Refuses a feed without some of ``names``, which this process's stages need."""
        missing = sorted(set(names) - set(self._parts))
        if missing:
            raise ConfigError(
                f"this rank's stages need {', '.join(map(repr, missing))}, which was not fed",
                got=f"a feed of {', '.join(map(repr, sorted(self._parts))) or 'nothing'}",
                fix="feed the whole mini-batch on every rank alike",
            )

    def put(self, name: str, micro_batch: int, tensor: ScopeTensor) -> None:
        """Copies a micro-batch's part of a feed into a dense tensor."""
        tensor.set(self._parts[name][micro_batch], self._place)

    def digest(self) -> int:
        """Returns a digest of the rows, of large arrays from some of their numbers."""
        digest = 0
        for _, parts in sorted(self._parts.items()):
            for part in parts:
                numbers = part.reshape(-1)
                some = numbers[:: 1 + numbers.size // _MOST_NUMBERS]
                digest = zlib.crc32(np.ascontiguousarray(some).tobytes(), digest)
        return digest


class ProgramBatch:
    """A mini-batch that this process can train on repeatedly.

    Attributes:
        results: The fetched values of the last run.
    """

    def __init__(self, fed: FedBatch | None, run: Callable[[], list[np.ndarray | None]]) -> None:
        """Creates a batch; ``run`` trains on ``fed``, and returns the fetched values."""
        self._fed, self._run = fed, run
        self.results: list[np.ndarray | None] = []

    @property
    def digests(self) -> tuple[int | None, None]:
        """The digest of the rows, or None at the end of the data; and None for labels."""
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


def _array(name: str, value: object, declared: Declared) -> np.ndarray:
    """Returns a feed as an array of the declared dtype; only Python numbers are converted."""
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
        array = _convert(name, value, declared)
    stored = "uint16" if declared.dtype == "bfloat16" else declared.dtype
    if array.dtype.name != stored:
        raise UsageError(
            f"the feed {name!r} has another dtype than its paddle.static.data",
            expected=declared.dtype,
            got=array.dtype.name,
            fix=f"feed {name!r} as array.astype({stored!r})",
        )
    return array


def _convert(name: str, value: object, declared: Declared) -> np.ndarray:
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


def _cut(
    name: str, array: np.ndarray, declared: Declared, micro_batches: int, rows: int
) -> Sequence[np.ndarray]:
    """Cuts an array into micro-batches; refuses a shape that does not fit the declaration."""
    shape = declared.shape
    whole = tuple(array.shape) == shape and all(size >= 0 for size in shape)
    if whole and not (shape and shape[0] == micro_batches * rows):
        return [array] * micro_batches
    expected = rows if not shape or shape[0] < 0 else shape[0]
    array_rows = array.shape[0] if array.ndim else 0
    fits = len(shape) == array.ndim and all(
        size in (-1, there) for size, there in zip(shape[1:], array.shape[1:])
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


def draw(items: Iterator[Item | Sequence[Item]], count: int) -> Item | None:
    """Takes ``count`` micro-batches and joins them; returns None if there are too few.

    A last micro-batch with fewer rows is incomplete, and does not count.

    Raises:
        ConfigError: Micro-batches have different shapes.
    """
    drawn: list[dict[str, np.ndarray]] = []
    while len(drawn) < count:
        try:
            # Not by a for loop: its iter() would make a loader of Paddle begin another epoch.
            item = next(items)
        except StopIteration:
            return None
        parts = merge([item]) if isinstance(item, Mapping) else merge(item)
        drawn.append({name: np.asarray(value) for name, value in parts.items()})
        if _rows(drawn[-1]) < _rows(drawn[0]):
            if next(items, None) is None:
                return None
            raise _unequal_shapes(drawn, "drop those with other rows, or fill them up")
    try:
        return {name: np.concatenate([one[name] for one in drawn]) for name in drawn[0]}
    except (KeyError, ValueError) as error:
        raise _unequal_shapes(drawn, "pad all micro-batches of a run to one length") from error


def _rows(item: Mapping[str, np.ndarray]) -> list[tuple[int, ...]]:
    """Returns the number of rows of each array, in the order of the names."""
    return [item[name].shape[:1] for name in sorted(item)]


def _unequal_shapes(drawn: Sequence[Mapping[str, np.ndarray]], fix: str) -> ConfigError:
    shapes = [{name: list(value.shape) for name, value in item.items()} for item in drawn]
    return ConfigError(
        "the micro-batches of a run have the same shapes",
        got="; ".join(str(one) for one in shapes),
        fix=f"{fix}; a last one with fewer rows ends the data",
    )


def merge(parts: object) -> Item:
    """Joins the parts of a micro-batch: the dicts of one or several loaders."""
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, Mapping) for p in parts):
        raise UsageError(
            "a micro-batch of an iterator is a dict of arrays by name",
            got=type(parts).__name__,
            fix="for a paddle.io.DataLoader: feed_list=[..] and return_list=False",
        )
    return {name: value for part in parts for name, value in part.items()}


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
    def of(cls, target: Variable | str, reader: GraphReader, split: Split) -> Fetch:
        """Finds the value that a user fetches: ``target`` is the value or its name.

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
        label = _label(target)
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


def _label(target: Variable | str) -> str:
    """Returns the name of a value for messages."""
    if isinstance(target, str):
        return target
    # Under PIR most values have no name, and reading it raises an error.
    return str(target.name) if getattr(target, "has_name", True) else str(target)


def combine(fetch: Fetch, values: Sequence[np.ndarray], how: str) -> np.ndarray:
    """Joins the values of all micro-batches into one result.

    Args:
        fetch: The entry of ``fetch_list``.
        values: An array for each micro-batch, in order.
        how: ``"mean"``: the mean of values with one element, in the order of the micro-batches and
            in their dtype (float64 for integers); values with rows are concatenated, as in the
            whole batch. ``"last"``: the value of the last micro-batch. ``"all"``: the values are
            stacked along a new first axis.

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
