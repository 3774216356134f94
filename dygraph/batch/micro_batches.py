"""Cuts a user's batch into micro-batches, and joins the outputs of the micro-batches.

Start with :func:`split`, which takes the batch ``[inputs, labels]`` in every form that Fleet takes.
If inputs need a gradient, as a trained prompt does, :func:`with_gradients` replaces each by a
detached tensor, its stand-in, and :func:`send_gradients_to_sources` runs backward from the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from fleetpipe.aliases import Nest, Optimizer, Scaler, Tensor
from fleetpipe.dygraph.nest import copy_tensors, join, leaves, map_tensors, rebuild
from fleetpipe.dygraph.random_keys import Keys
from fleetpipe.errors import BoundaryError, ConfigError, UsageError, listed
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.meta_parallel import PipelineDatasetPreprocessor

#: The script's tensors that need a gradient, each with the stand-in that the pipeline uses.
Sources = list[tuple[Tensor, Tensor]]


class MicroBatches(NamedTuple):
    """Inputs and labels: lists with a value for each micro-batch; None if this rank has none."""

    inputs: Nest
    labels: Nest


class MicroBatchCut(NamedTuple):
    """The sizes of the micro-batches into which a batch is cut.

    Attributes:
        steps: The number m of micro-batches (``accumulate_steps``).
        size: The number of rows of each Tensor of a micro-batch (``micro_batch_size``).
        any_rows: Whether to accept a batch with another number of rows than steps x size, or of
            values in a list. Its rows are cut into micro-batches of ``size``, of which the last may
            be smaller.
        keeps_graph: Whether micro-batches stay connected to tensors that need a gradient.
    """

    steps: int
    size: int
    any_rows: bool = False
    keeps_graph: bool = False


def split(data: Nest, cut: MicroBatchCut) -> MicroBatches:
    """Cuts ``data`` into micro-batches.

    Args:
        data: ``[inputs, labels]`` of a whole batch; or an iterator, from which exactly
            ``cut.steps`` micro-batches are drawn and copied; or a ``PipelineDatasetPreprocessor``
            that returns one of these; or None on a rank that needs neither.
        cut: The sizes of the micro-batches.

    Returns:
        The micro-batches, detached unless ``cut.keeps_graph``.

    Raises:
        ConfigError: The number of rows or items does not fit.
        BoundaryError: A value is not made of Tensors.
    """
    data = unwrap(data)
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
        parts = MicroBatches(*(split_value(v, cut, n) for v, n in zip(data, MicroBatches._fields)))
        if parts.inputs and parts.labels and len(parts.inputs) != len(parts.labels):
            raise ConfigError(
                "inputs and labels do not have the same number of micro-batches",
                got=f"{len(parts.inputs)} and {len(parts.labels)}",
                fix="give inputs and labels the same number of rows",
            )
        return parts
    if not is_iterator(data):
        fix = "pass [inputs, labels]"
        if isinstance(data, Mapping):
            fix = f"name both in it: [batch[..], batch[..]] of {listed(list(map(repr, data)))}"
        elif hasattr(data, "__iter__") and not isinstance(data, (str, paddle.Tensor)):
            fix = "pass iter(loader) for a DataLoader whose batches are micro-batches"
        raise ConfigError(
            "data must be [inputs, labels] or an iterator of (inputs, labels) micro-batches",
            got=type(data).__name__,
            fix=fix,
        )
    return _take_micro_batches(data, cut.steps, cut.keeps_graph)


def is_iterator(data: Nest) -> bool:
    """Whether micro-batches are drawn from ``data`` one by one."""
    return hasattr(type(data), "__next__")


def unwrap(data: Nest) -> Nest:
    """Returns the data of a ``PipelineDatasetPreprocessor``; other ``data`` unchanged."""
    return data() if isinstance(data, PipelineDatasetPreprocessor) else data


def split_value(value: Nest, cut: MicroBatchCut, path: str) -> list[Nest] | None:
    """Cuts the inputs or the labels of a whole batch into a list of micro-batches.

    Args:
        value: The inputs or the labels; None stays None.
        cut: The sizes of the micro-batches.
        path: The name of the value in messages.

    Raises:
        ConfigError: The number of rows or values does not fit.
        BoundaryError: A value is not made of Tensors.
    """
    if value is None:
        return None
    if isinstance(value, paddle.Tensor):
        return _split_rows(value, cut, path)
    if isinstance(value, list):
        if len(value) != cut.steps and not (cut.any_rows and value):
            raise ConfigError(
                f"{path} is a list, which means one value per micro-batch",
                expected=f"{cut.steps} values (accumulate_steps)",
                got=f"{len(value)} values",
                fix="use a tuple for several tensors of the whole batch",
            )
        keeps = cut.keeps_graph
        return [
            _detach_micro_batch(item, f"{path}[{index}]", keeps) for index, item in enumerate(value)
        ]
    if isinstance(value, tuple):
        items = [split_value(item, cut, f"{path}[{i}]") for i, item in enumerate(value)]
        indices = range(_common_length(items, cut, path))
        return [rebuild(value, [item and item[index] for item in items]) for index in indices]
    if isinstance(value, dict):
        by_key = {key: split_value(item, cut, f"{path}[{key!r}]") for key, item in value.items()}
        indices = range(_common_length(list(by_key.values()), cut, path))
        return [{key: item and item[i] for key, item in by_key.items()} for i in indices]
    raise _no_tensor_error(value, path)


def ragged_weights(value: Nest, cut: MicroBatchCut) -> list[Fraction] | None:
    """Returns each micro-batch's fraction of all rows, if the last micro-batch has fewer rows.

    Args:
        value: The labels of a whole batch, as the user gave them.
        cut: The sizes of the micro-batches.

    Returns:
        The fractions; None if all micro-batches have the same number of rows.
    """
    if isinstance(value, (tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        of_items = (ragged_weights(item, cut) for item in items)
        return next((shares for shares in of_items if shares is not None), None)
    if not isinstance(value, paddle.Tensor) or not value.ndim or value.shape[0] % cut.size == 0:
        return None
    rows = value.shape[0]
    whole = [Fraction(cut.size, rows)] * (rows // cut.size)
    return [*whole, Fraction(rows % cut.size, rows)]


def _take_micro_batches(data: Iterator[Nest], count: int, keeps_graph: bool) -> MicroBatches:
    """Takes micro-batches from an iterator, and copies their tensors.

    Args:
        data: Yields a pair ``(inputs, labels)`` for each micro-batch; further items stay in it.
        count: The number of micro-batches to take.
        keeps_graph: Whether inputs stay connected to tensors that need a gradient; labels never do.

    Raises:
        ConfigError: The iterator ended before, or an item is no pair.
        BoundaryError: A value is not made of Tensors.
    """
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
                fix="yield one tuple (inputs, labels) per micro-batch: of a loader of dicts, "
                'iter((b["x"], b["y"]) for b in loader) with their names',
            )
        # Copied: the iterator may fill the same tensors again for the next item.
        inputs.append(
            copy_tensors(
                _detach_micro_batch(item[0], f"inputs of micro-batch {index}", keeps_graph)
            )
        )
        labels.append(copy_tensors(_detach_micro_batch(item[1], f"labels of micro-batch {index}")))
    return MicroBatches(inputs, labels)


def _common_length(items: list[list[Nest] | None], cut: MicroBatchCut, path: str) -> int:
    """Returns the number of micro-batches into which all items of a tuple or dict were cut.

    Args:
        items: The micro-batches of each item; None for an item that is None.
        cut: The sizes of the micro-batches.
        path: The name of the container in messages.

    Raises:
        ConfigError: The items have different numbers.
    """
    lengths = {len(item) for item in items if item is not None} or {cut.steps}
    if len(lengths) > 1:
        raise ConfigError(
            f"the parts of {path} do not have the same number of micro-batches",
            got=" and ".join(map(str, sorted(lengths))),
            fix="give all parts the same number of rows; in a list, one value per micro-batch",
        )
    return lengths.pop()


def _split_rows(tensor: Tensor, cut: MicroBatchCut, path: str) -> list[Tensor]:
    """Cuts a tensor along axis 0 into micro-batches; ``path`` is its name in messages.

    Raises:
        ConfigError: The number of rows does not fit.
    """
    count, size, any_rows, _ = cut
    rows = tensor.shape[0] if tensor.ndim else None
    if rows != count * size:
        if not any_rows or not rows:
            raise ConfigError(
                f"{path} does not have accumulate_steps x micro_batch_size rows",
                expected=f"{count} x {size} = {count * size} rows",
                got="a 0-D tensor" if rows is None else f"{rows} rows (shape {tensor.shape})",
                fix="change the batch, or strategy.pipeline_configs; drop an incomplete last "
                f"batch; give what all micro-batches share to each of them, as [value] * {count}",
            )
        count = -(-rows // size)
    whole = tensor if cut.keeps_graph and not tensor.stop_gradient else tensor.detach()
    return [whole[index * size : (index + 1) * size] for index in range(count)]


def _detach_micro_batch(value: Nest, path: str, keeps_graph: bool = False) -> Nest:
    """Returns the value of one micro-batch, detached; refuses leaves other than tensors and None.

    Args:
        value: The inputs or the labels of a micro-batch.
        path: The name of the value in messages.
        keeps_graph: Whether to return the value as it is, connected to its graph.
    """
    for steps, leaf in leaves(value):
        if leaf is not None and not isinstance(leaf, paddle.Tensor):
            raise _no_tensor_error(leaf, path + "".join(f"[{step!r}]" for step in steps))
    return value if keeps_graph else map_tensors(lambda tensor: tensor.detach(), value)


def counted_in(value: Nest) -> int | None:
    """Returns the number of rows of a replica's labels, which weights its loss among replicas.

    Args:
        value: The labels, as the user gave them.

    Returns:
        The number of rows of a whole batch; of a list, the number of its micro-batches; None for an
        iterator.
    """
    if isinstance(value, (tuple, dict)):
        items = list(value.values() if isinstance(value, dict) else value)
        return next((n for n in map(counted_in, items) if n is not None), None)
    if isinstance(value, list):
        return len(value)
    return int(value.shape[0]) if isinstance(value, paddle.Tensor) and value.ndim else None


def _no_tensor_error(value: Nest, path: str) -> BoundaryError:
    """Returns the error of a value that is no tensor, at a path such as ``inputs[1]``."""
    return BoundaryError(
        f"{path} is not a Tensor",
        expected="a Tensor, a list with one value per micro-batch, a tuple or dict of those, None",
        got=type(value).__name__,
        fix="leave it out, or give None in its place: a captured model takes the plain values of "
        "its example_inputs; [paddle.to_tensor(..)] * accumulate_steps if it differs from batch to "
        "batch"
        if isinstance(value, (bool, int, float, str))
        else "convert it with paddle.to_tensor before train_batch",
    )


class FakeMicroDataset:
    """Fleet's iterator over the micro-batches ``(inputs, labels)`` of a batch."""

    def __init__(
        self,
        data: Nest,
        is_first_stage: bool,
        is_last_stage: bool,
        acc_steps: int,
        micro_batch_size: int,
    ) -> None:
        """Cuts a batch.

        Args:
            data: ``[inputs, labels]`` in any form that ``train_batch`` takes.
            is_first_stage: Whether to yield the inputs; None in their place otherwise.
            is_last_stage: Whether to yield the labels; None in their place otherwise.
            acc_steps: The number of micro-batches.
            micro_batch_size: The number of rows of each.

        Raises:
            ConfigError: The number of rows does not fit.
            BoundaryError: A value is not made of Tensors.
        """
        inputs, labels = split(data, MicroBatchCut(acc_steps, micro_batch_size))
        nothing = [None] * acc_steps
        self._items = zip(
            inputs if is_first_stage and inputs else nothing,
            labels if is_last_stage and labels else nothing,
        )

    def __iter__(self) -> FakeMicroDataset:
        return self

    def __next__(self) -> tuple[Nest, Nest]:
        return next(self._items)


def with_gradients(data: Nest) -> tuple[Nest, Sources]:
    """Replaces inputs of a batch that need a gradient by detached tensors, their stand-ins.

    Args:
        data: A batch in any form that :func:`split` takes.

    Returns:
        The changed batch, and the replaced tensors with their stand-ins. Those of an iterator are
        added to this list when their micro-batch is taken.
    """
    sources: Sources = []

    def stand_in(tensor: Tensor) -> Tensor:
        """Returns a detached tensor in place of one that needs a gradient; stores both."""
        if tensor.stop_gradient:
            return tensor
        copy = tensor.detach()
        copy.stop_gradient = False
        sources.append((tensor, copy))
        return copy

    def replace_inputs(value: Nest) -> Nest:
        """Replaces inputs by stand-ins, and detaches labels, of ``(inputs, labels)``."""
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            return value
        return [map_tensors(stand_in, value[0]), map_tensors(_without_gradient, value[1])]

    data = unwrap(data)
    if is_iterator(data):
        return _map_items(replace_inputs, data), sources
    return replace_inputs(data), sources


def _map_items(change: Callable[[Nest], Nest], iterator: Nest) -> Iterator[Nest]:
    """Yields ``change(item)`` for each item; the iterator needs only ``__next__``."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield change(item)


def without_gradients(batches: MicroBatches) -> MicroBatches:
    """Returns micro-batches whose inputs are detached, so that they need no gradient."""
    inputs = batches.inputs and [map_tensors(_without_gradient, value) for value in batches.inputs]
    return batches._replace(inputs=inputs)


def _without_gradient(tensor: Tensor) -> Tensor:
    """Returns the tensor itself, detached if it needs a gradient."""
    return tensor if tensor.stop_gradient else tensor.detach()


def send_gradients_to_sources(sources: Sources, divisor: int) -> None:
    """Runs backward from the script's tensors, with the gradients that their stand-ins have.

    Args:
        sources: The script's tensors, each with its stand-in.
        divisor: The number by which the gradients are divided.
    """
    reached: Sequence[tuple[Tensor, Tensor]] = [
        (tensor, stand_in) for tensor, stand_in in sources if stand_in.grad is not None
    ]
    if reached:
        gradients = [s.grad if divisor == 1 else s.grad / divisor for _, s in reached]
        paddle.autograd.backward([tensor for tensor, _ in reached], gradients)


class ObservedBatch(NamedTuple):
    """A training batch, as observers see it before it runs.

    Attributes:
        data: The micro-batches that the caller gave this rank.
        keys: The seeds for random numbers in layers; None if the user's seeds apply.
        weights: The weight of each micro-batch; None if the caller gives none.
        loss_fn_idx: The number of the loss function that backward starts from.
        optimizer: The optimizer that steps after the batch; None if the caller steps.
        scaler: The scaler of the loss; None without one.
    """

    data: MicroBatches
    keys: Keys | None
    weights: Sequence[Fraction] | None
    loss_fn_idx: int
    optimizer: Optimizer
    scaler: Scaler


def require_count(batches: MicroBatches, count: int) -> None:
    """Refuses inputs or labels of this rank with another number of micro-batches than ``count``.

    Args:
        batches: The micro-batches of this rank.
        count: The number of micro-batches on the rank of the first stage.
    """
    for name, part in zip(batches._fields, batches):
        if part is not None and len(part) != count:
            raise ConfigError(
                f"the {name} given to this rank are not those of the first stage's batch",
                expected=f"{count} micro-batches",
                got=f"{len(part)} micro-batches",
                fix="give all ranks the same batch, or None where a rank needs none",
            )


def on_host(value: Nest) -> Nest:
    """Returns ``value`` with its tensors moved to the memory of the host."""
    return map_tensors(
        lambda tensor: tensor if tensor.place.is_cpu_place() else tensor.cpu(), value
    )


def join_outputs(values: Sequence[Nest]) -> Nest:
    """Joins the outputs of micro-batches along axis 0, in containers like those of one output.

    Tensors without dimensions are stacked. Texts, flags and None must be equal in all outputs, and
    appear once.

    Raises:
        UsageError: The outputs have other containers, or numbers that are no tensors.
    """
    return join(_join_items, values)


def _join_items(items: Sequence[Nest]) -> Nest:
    """Joins the values that several outputs have at one path, such as ``output["logits"]``."""
    first = items[0]
    if isinstance(first, paddle.Tensor):
        return paddle.concat(list(items)) if first.ndim else paddle.stack(list(items))
    if type(first) in (int, float) and len(items) > 1:
        raise UsageError(
            "a number in an output is that of one micro-batch, and there are several",
            got=", ".join(map(str, items)),
            fix="return a tensor, whose values are stacked; or take outputs one by one, from "
            "eval_batch",
        )
    unlike = any(type(item) is not type(first) for item in items)
    if unlike or isinstance(first, (tuple, list, dict)) or any(item != first for item in items):
        raise UsageError(
            "the outputs of the micro-batches cannot be joined: they do not have the same form",
            got=", ".join(type(item).__name__ for item in items),
            fix="take them one by one, from eval_batch",
        )
    return first
