"""Cuts sequences into slices (sequence chunks), and keeps values of layers for later slices.

Some schedules cut the sequences of each micro-batch into slices: parts of consecutive positions,
which run through the pipeline one after another as a micro-batch does otherwise. A layer whose
positions depend on earlier positions (causal attention, a recurrent net) asks for the values that
it kept in earlier slices (``earlier``), and keeps its own for later ones (``keep``)::

    class Attention(nn.Layer):
        takes_slices = True

        def forward(self, hidden):
            query, key, value = ...
            kept = slices.earlier(self)
            slices.keep(self, (key, value))
            if kept:
                key = paddle.concat([*(k for k, _ in kept), key], axis=-2)
                ...

A later slice gets leaves in place of the kept tensors, at which its backward ends. Backwards run
from the last slice to the first: when the backward of a slice begins, the leaves have the sum of
the gradients of all later slices, and it begins from these as well as from its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from itertools import accumulate
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.config import PipelineConfig
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.units import Units, UnitStates, WeightOf, places_in
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.nest import differentiable, leaf_like, map_tensors, tensors_of
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Schedule

__all__ = ["earlier", "keep"]

#: The slices whose forward runs in this process, the innermost one last; None for a backward, in
#: which layers cannot keep values.
_running: list[_Slice | None] = []

#: How sequences are cut: into so many slices of nearly equal lengths, or into slices whose lengths
#: have these proportions.
Slicing = int | tuple[int, ...]

#: The first position of a slice, and the one after its last.
Bounds = list[tuple[int, int]]

#: The layers of Paddle, and of its tensor parallelism, that compute each position by itself.
_POSITIONWISE_LAYERS = (
    *("Linear", "Embedding", "LayerNorm", "RMSNorm", "Dropout", "Identity"),
    *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
    *("ReLU", "ReLU6", "LeakyReLU", "ELU", "GELU", "Silu", "Swish", "Tanh", "Sigmoid"),
)
#: The functions of these names, in whichever module of Paddle's they are defined.
_POSITIONWISE_FUNCTIONS = {
    getattr(paddle.nn.functional, name)
    for name in ("relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "swish", "tanh", "sigmoid")
}
_PADDLES = ("paddle.nn.", "paddle.distributed.", "fleetpipe.dygraph.tensor_parallel.")


class _Slice:
    """One slice of a micro-batch in one stage, with the values that its layers keep."""

    def __init__(self, earlier: list[_Slice]) -> None:
        """Begins a slice that comes after the slices ``earlier`` of its micro-batch."""
        self.before = list(earlier)
        #: By the id of a layer the value that it kept, within the graph of this slice.
        self.kept: dict[int, Nest] = {}
        #: By the id of a layer the leaves that later slices get in place of that value.
        self.leaves: dict[int, Nest] = {}


def earlier(layer: Layer) -> list[Nest]:
    """Returns what ``layer`` kept in the earlier slices of this micro-batch, in order.

    The list is empty in the first slice, and whenever sequences are whole: in evaluation, under any
    other schedule, and in a direct call.

    Args:
        layer: The layer that calls this, ``self``.

    Raises:
        UsageError: The layer is called again in a backward, by recompute.
    """
    now = _current_slice()
    return [] if now is None else [slice_.leaves[id(layer)] for slice_ in now.before]


def keep(layer: Layer, value: Nest) -> None:
    """Keeps ``value`` for the later slices of this micro-batch; does nothing without slices.

    Args:
        layer: The layer that keeps the value, ``self``. It must keep one value in each slice.
        value: Tensors and plain values in tuples, lists and dicts. Gradients of the tensors come
            back from the later slices.

    Raises:
        UsageError: The layer kept something in this slice already; or it is called again in a
            backward, by recompute.
    """
    now = _current_slice()
    if now is None:
        return
    if id(layer) in now.kept:
        raise UsageError(
            f"{type(layer).__name__} keeps two values in one slice",
            cause="it is called twice in a stage",
            fix="keep one value, a tuple say; build a layer for each call",
        )
    now.kept[id(layer)] = value
    # Later slices use leaves of the graph, whose gradients then continue in this slice's backward.
    now.leaves[id(layer)] = map_tensors(leaf_like, value)


def _current_slice() -> _Slice | None:
    """Returns the slice whose forward runs; None if sequences are whole.

    Raises:
        UsageError: A backward runs, in which recompute calls a layer again.
    """
    if not _running:
        return None
    now = _running[-1]
    if now is None:  # which a backward puts on the stack
        raise UsageError(
            "a layer that keeps values between slices is called again in a backward",
            cause="recompute, which cannot tell slices apart",
            fix="leave recompute out for this layer: slices save memory too",
        )
    return now


@contextmanager
def repeat_slice() -> Iterator[Mapping[int, Nest]]:
    """In this context, layers may run the current slice several times, to measure them.

    Yields:
        The values that layers keep, by the layer's id; empty if sequences are whole.
    """
    now = _current_slice()
    if now is None:
        yield {}
        return
    trial = _Slice(now.before)
    _running.append(trial)
    try:
        yield trial.kept
    finally:
        _running.pop()


class SliceStates(UnitStates):
    """The slices of a batch with the values that layers keep, until their backwards have run."""

    def __init__(self, slices: int) -> None:
        """Begins a batch whose micro-batches have ``slices`` slices each."""
        self._slices = slices
        #: By stage and micro-batch the slices whose forward has run, and whose backward has not.
        self._kept: dict[tuple[int, int], list[_Slice]] = {}

    @contextmanager
    def forward(self, stage: int, number: int) -> Iterator[None]:
        """In this context, the layers of a stage run slice ``number`` of the batch."""
        done = self._kept.setdefault((stage, number // self._slices), [])
        now = _Slice(done)
        _running.append(now)
        try:
            yield
        finally:
            _running.pop()
        now.before.clear()
        done.append(now)

    @contextmanager
    def backward(self, stage: int, number: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """In this context, the backward of slice ``number`` runs, after those of later slices.

        Yields:
            The tensors from which the backward begins besides the output, and their gradients.
        """
        last = self._kept[stage, number // self._slices][-1]
        tensors, grads = [], []
        for layer, value in last.kept.items():
            leaves = differentiable(last.leaves[layer])
            for tensor, leaf in zip(differentiable(value), leaves):
                if leaf.grad is not None:
                    tensors.append(tensor)
                    grads.append(leaf.grad)
        _running.append(None)
        try:
            yield tensors, grads
        finally:
            _running.pop()

    def release(self, stage: int, number: int) -> None:
        """Drops what layers keep in the last remaining slice of a stage and micro-batch."""
        key = stage, number // self._slices
        self._kept[key].pop()
        if not self._kept[key]:
            del self._kept[key]


def slices_in(slicing: Slicing) -> int:
    """Returns into how many slices a sequence is cut."""
    return slicing if isinstance(slicing, int) else len(slicing)


def cut_sequences(batches: MicroBatches, slicing: Slicing) -> MicroBatches:
    """Cuts each micro-batch along axis 1 into slices.

    Args:
        batches: Micro-batches of tensors [rows, length, ..].
        slicing: How sequences are cut. In an equal cut the first slices are one position longer if
            the length is not divisible.

    Returns:
        The slices of all micro-batches, in order.

    Raises:
        ConfigError: A tensor has no axis 1, or fewer positions than there are slices; or the
            tensors of a micro-batch have different lengths.
    """
    return MicroBatches(
        *(_slices_of_all(part, slicing, name) for part, name in zip(batches, batches._fields))
    )


def bounds_of(value: Nest, slicing: Slicing, name: str) -> Bounds:
    """Returns the bounds of the slices of a micro-batch; ``name`` is for messages.

    Raises:
        ConfigError: The sequences cannot be cut into slices.
    """
    slices = slices_in(slicing)
    tensors: list[Tensor] = list(tensors_of(value))
    lengths = {tensor.shape[1] if tensor.ndim > 1 else 0 for tensor in tensors}
    if len(lengths) != 1 or min(lengths) < slices:
        raise ConfigError(
            "sequences are cut into slices along axis 1",
            where=name,
            expected=f"tensors [rows, length, ..] of one length, of at least {slices} (slices)",
            got=" and ".join(str(list(tensor.shape)) for tensor in tensors) or "no tensors",
            fix="give the place in the sequence axis 1, fewer slices, or another schedule_mode",
        )
    return bounds(int(lengths.pop()), slicing)


def bounds(length: int, slicing: Slicing) -> Bounds:
    """Returns the bounds of the slices of a sequence; each slice has at least one position.

    Args:
        length: Positions of the sequence, at least as many as there are slices.
        slicing: How the sequence is cut.
    """
    slices = slices_in(slicing)
    if isinstance(slicing, int):  # equal slices, of which the first ``longer`` have one more
        size, longer = divmod(length, slices)
        ends = [(index + 1) * size + min(index + 1, longer) for index in range(slices)]
        return list(zip([0, *ends], ends))
    total, end, ends = sum(slicing), 0, []
    for index, shares_so_far in enumerate(accumulate(slicing)):
        # To the nearest position, half up; and a position is left for each slice that follows.
        nearest = (2 * length * shares_so_far + total) // (2 * total)
        end = max(end + 1, min(nearest, length - (slices - 1 - index)))
        ends.append(end)
    return list(zip([0, *ends], ends))


def part_of(value: Nest, begin: int, end: int) -> Nest:
    """Returns the positions ``begin`` to ``end - 1`` of the tensors of a micro-batch."""
    return map_tensors(lambda tensor: tensor[:, begin:end], value)


def _slices_of_all(values: Sequence[Nest] | None, slicing: Slicing, name: str) -> list[Nest] | None:
    """Returns the slices of all micro-batches, in order; None if ``values`` is None."""
    if values is None:
        return None
    return [
        part_of(value, begin, end)
        for value in values
        for begin, end in bounds_of(value, slicing, name)
    ]


def slice_shares(
    functions: Sequence[Criterion], batches: MicroBatches, slicing: Slicing
) -> list[list[Fraction]]:
    """Returns, for each loss function, each slice's weight in the loss of its micro-batch.

    If no position of a micro-batch is counted, its slices count by their lengths.

    Args:
        functions: The loss functions.
        batches: The micro-batches before the cut, as far as this rank has them.
        slicing: How the sequences are cut.

    Raises:
        ConfigError: Sequences cannot be cut, or what a function counts cannot be read.
    """
    if not batches.labels:
        # A rank without the last stage needs no shares.
        return []
    cuts = [bounds_of(label, slicing, "a micro-batch") for label in batches.labels]
    return [
        [
            share
            for label, cut in zip(batches.labels, cuts)
            for share in _loss_shares(function, label, cut)
        ]
        for function in functions
    ]


def _loss_shares(function: Any, label: Nest, cut: Bounds) -> list[Fraction]:
    """Returns the weight of each slice in the loss of one micro-batch.

    Args:
        function: The loss function: a mean over some positions, or a sum.
        label: The labels of the micro-batch.
        cut: The bounds of its slices.
    """
    counts = [places_in(function, part_of(label, begin, end)).mean_over for begin, end in cut]
    if None in counts:  # a sum
        return [Fraction(1)] * len(cut)
    total = sum(counts)
    if not total:
        _, length = cut[-1]
        return [Fraction(end - begin, length) for begin, end in cut]
    return [count / total for count in counts]


class SequenceChunks(Units):
    """How a stage runs a batch whose sequences are cut: one slice of a micro-batch at a time.

    Attributes:
        slicing: How sequences are cut.
    """

    def __init__(self, slicing: Slicing) -> None:
        self.slicing, self.count = slicing, slices_in(slicing)

    def cut(self, batches: MicroBatches) -> MicroBatches:
        """Returns the slices of the micro-batches, in order."""
        return cut_sequences(batches, self.slicing)

    def weight_of(
        self, functions: Sequence[Criterion], batches: MicroBatches, weight_of: WeightOf
    ) -> WeightOf:
        """Returns a function that gives the weight of each slice in the loss."""
        shares = slice_shares(functions, batches, self.slicing)
        return lambda function, number: (
            weight_of(function, number // self.count) * shares[function][number]
        )

    def states(self) -> SliceStates:
        """Returns a new store for the values that layers keep during a batch."""
        return SliceStates(self.count)

    def again(self) -> AbstractContextManager[Mapping[int, Nest]]:
        """Returns a context in which layers may run the current slice several times."""
        return repeat_slice()

    def lengths(self, value: Nest) -> list[int]:
        """Returns the number of positions of each slice of a micro-batch."""
        bounds = bounds_of(value, self.slicing, "a micro-batch")
        return [end - begin for begin, end in bounds]

    def name(self, number: int) -> str:
        """Returns the name, for messages, of slice ``number`` of the batch."""
        micro_batch, index = divmod(number, self.count)
        return f"micro-batch {micro_batch}, slice {index}"


def sequence_chunks(
    schedule: Schedule,
    config: PipelineConfig,
    layers: PipelineLayer,
    parts_of_sequences: int,
    delays_weights: bool,
) -> Units:
    """Returns how a schedule that cuts sequences runs a batch: slice by slice.

    Args:
        schedule: The schedule.
        config: The options of the pipeline.
        layers: The model.
        parts_of_sequences: The number of ranks that share each sequence, sep times cp.
        delays_weights: Whether ``delay_scale_loss`` weights the losses at the end of a batch.

    Raises:
        ConfigError: A layer does not take slices, or another option does not work with slices.
    """
    require_sliceable(layers.layers)
    lengths = config.slices
    if parts_of_sequences > 1:
        raise ConfigError(
            f"the schedule {schedule.name} cuts sequences that ranks have parts of",
            got=f"{schedule.slices} sequence chunks of a micro-batch, with "
            f"sep_degree x cp_degree = {parts_of_sequences}",
            cause="a chunk would have to wait for later ones of another rank",
            fix="choose a schedule without sequence chunks, 1F1B or ZBH1, or split no sequence",
        )
    if delays_weights:
        raise ConfigError(
            "delay_scale_loss weights all losses alike, and slices need not be of one length",
            fix="leave delay_scale_loss out, or choose a schedule without slices",
        )
    if layers.owned_stages.recomputes:
        raise ConfigError(
            "recompute_interval cannot be had together with slices of sequences",
            cause="a layer that is run again cannot tell which slice it runs",
            fix="leave recompute_interval out: slices save memory too",
        )
    return SequenceChunks(lengths if isinstance(lengths, tuple) else schedule.slices)


def require_sliceable(entries: Sequence[Any]) -> None:
    """Checks that no layer of a list computes something wrong for a slice of a sequence.

    Args:
        entries: Layers, functions, and descriptions of layers.

    Raises:
        ConfigError: A layer or function is not one of Paddle's that compute each position by
            itself, and does not have ``takes_slices = True``.
    """
    functions = (
        (number, function)
        for number, entry in enumerate(entries)
        for function in (getattr(entry, "layer_func", entry), getattr(entry, "forward_func", None))
        if function is not None
    )
    for number, function in functions:
        is_layer = hasattr(function, "forward") and not isinstance(function, type)
        kind = type(function) if is_layer else function
        name = getattr(kind, "__name__", repr(kind))
        is_positionwise = kind in _POSITIONWISE_FUNCTIONS or (
            name in _POSITIONWISE_LAYERS and kind.__module__.startswith(_PADDLES)
        )
        if not is_positionwise and getattr(kind, "takes_slices", False) is not True:
            raise ConfigError(
                f"layer {number}, {name}, does not say that it takes slices of a sequence",
                cause="a schedule with slices gives a layer a part of the sequence at a time; one "
                "whose places see others, as attention does, has to keep what later slices need",
                fix=f"use fleetpipe.contrib.slices in {name}.forward if its places see others, "
                f"and set {name}.takes_slices = True; or choose another schedule_mode. A captured "
                "model has no such layers: build a PipelineLayer",
            )
