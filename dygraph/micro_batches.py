"""Cuts a user's batch into the micro-batches of a step, in every form that Fleet takes.

``[inputs, labels]`` holds the whole batch; each of the two may be a Tensor (cut along its first
axis), a list of one value per micro-batch, a tuple or dict of those, or None on a rank that does
not need it. Anything else is an iterator of ``(inputs, labels)``, one item per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.errors import BoundaryError, ConfigError


class MicroBatches(NamedTuple):
    """Lists with one entry per micro-batch; None where this rank was given no inputs or labels."""

    inputs: Any
    labels: Any


def split(data: Any, count: int, size: int) -> MicroBatches:
    """Cuts ``data`` into ``count`` micro-batches of ``size`` rows.

    Args:
        data: ``[inputs, labels]`` of a whole batch, or an iterator over micro-batches, of which
            exactly ``count`` items are consumed; None on a rank that needs neither.
        count: The number m of micro-batches (``accumulate_steps``).
        size: Rows of each Tensor of a micro-batch (``micro_batch_size``).

    Returns:
        The micro-batches; all tensors are detached.

    Raises:
        ConfigError: The number of rows or items does not fit.
        BoundaryError: A value is not made of Tensors.
    """
    if data is None:
        return MicroBatches(None, None)
    if isinstance(data, (list, tuple)):
        if len(data) != 2:
            raise ConfigError(
                "data must be [inputs, labels]",
                expected="2 entries",
                got=f"{len(data)} entries",
                fix="put several inputs into a tuple: [(x1, x2), labels]",
            )
        inputs, labels = data
        return MicroBatches(
            _split(inputs, count, size, "inputs"), _split(labels, count, size, "labels")
        )
    if not isinstance(data, Iterator):
        raise ConfigError(
            "data must be [inputs, labels] or an iterator of (inputs, labels) micro-batches",
            got=type(data).__name__,
            fix="pass iter(loader) for a DataLoader whose batches are micro-batches",
        )
    return _draw(data, count)


def _draw(data: Iterator[Any], count: int) -> MicroBatches:
    inputs, labels = [], []
    for index in range(count):
        try:
            item = next(data)
        except StopIteration:
            raise ConfigError(
                f"the data iterator ended after {index} of {count} micro-batches",
                fix="give it a multiple of accumulate_steps items, e.g. drop the last group",
            ) from None
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise ConfigError(
                "each item of the data iterator must be (inputs, labels)",
                where=f"micro-batch {index}",
                got=type(item).__name__,
            )
        inputs.append(_detached(item[0], f"inputs of micro-batch {index}"))
        labels.append(_detached(item[1], f"labels of micro-batch {index}"))
    return MicroBatches(inputs, labels)


def _split(value: Any, count: int, size: int, path: str) -> list[Any] | None:
    if value is None:
        return None
    if isinstance(value, paddle.Tensor):
        return _rows(value, count, size, path)
    if isinstance(value, list):
        if len(value) != count:
            raise ConfigError(
                f"{path} is a list, which means one value per micro-batch",
                expected=f"{count} values (accumulate_steps)",
                got=f"{len(value)} values",
                fix="use a tuple for several tensors of the whole batch",
            )
        return [_detached(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        parts = [_split(item, count, size, f"{path}[{i}]") for i, item in enumerate(value)]
        return [tuple(part and part[index] for part in parts) for index in range(count)]
    if isinstance(value, dict):
        named = {key: _split(item, count, size, f"{path}[{key!r}]") for key, item in value.items()}
        return [{key: part and part[i] for key, part in named.items()} for i in range(count)]
    raise _not_a_tensor(value, path)


def _rows(tensor: Any, count: int, size: int, path: str) -> list[Any]:
    rows = tensor.shape[0] if tensor.ndim else None
    if rows != count * size:
        raise ConfigError(
            f"{path} does not have accumulate_steps x micro_batch_size rows",
            expected=f"{count} x {size} = {count * size} rows",
            got="a 0-D tensor" if rows is None else f"{rows} rows (shape {list(tensor.shape)})",
            fix="change the batch, or strategy.pipeline_configs; drop an incomplete last batch",
        )
    whole = tensor.detach()
    return [whole[index * size : (index + 1) * size] for index in range(count)]


def _detached(value: Any, path: str) -> Any:
    if value is None:
        return None
    if isinstance(value, paddle.Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return type(value)(_detached(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _detached(item, f"{path}[{key!r}]") for key, item in value.items()}
    raise _not_a_tensor(value, path)


def _not_a_tensor(value: Any, path: str) -> BoundaryError:
    return BoundaryError(
        f"{path} is not a Tensor",
        expected="a Tensor, a list with one value per micro-batch, a tuple or dict of those, None",
        got=type(value).__name__,
        fix="convert it with paddle.to_tensor before train_batch",
    )
