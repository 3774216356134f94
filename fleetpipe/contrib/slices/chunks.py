"""Runs micro-batches whose sequences a schedule cuts into slices; each slice is a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.config import PipelineConfig
from fleetpipe.contrib.slices import kept
from fleetpipe.contrib.slices.lengths import Slicing, bounds_of, cut_sequences, slices_in
from fleetpipe.contrib.slices.shares import slice_shares
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.units import WHOLE, Units, WeightOf
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.schedules import Schedule


class SequenceChunks(Units):
    """The units of a batch whose sequences are cut into slices.

    Attributes:
        slicing: How sequences are cut.
    """

    def __init__(self, slicing: Slicing) -> None:
        self.slicing, self.count = slicing, slices_in(slicing)

    def cut(self, batches: MicroBatches) -> MicroBatches:
        """See :meth:`Units.cut`."""
        return cut_sequences(batches, self.slicing)

    def weight_of(
        self, functions: Sequence[Criterion], batches: MicroBatches, weight_of: WeightOf
    ) -> WeightOf:
        """See :meth:`Units.weight_of`."""
        shares = slice_shares(functions, batches, self.slicing)
        return lambda function, number: (
            weight_of(function, number // self.count) * shares[function][number]
        )

    def states(self) -> kept.SliceStates:
        """See :meth:`Units.states`."""
        return kept.SliceStates(self.count)

    def again(self) -> AbstractContextManager[Mapping[int, Nest]]:
        """See :meth:`Units.again`."""
        return kept.again()

    def lengths(self, value: Nest) -> list[int]:
        """See :meth:`Units.lengths`."""
        bounds = bounds_of(value, self.slicing, "a micro-batch")
        return [end - begin for begin, end in bounds]

    def name(self, number: int) -> str:
        """See :meth:`Units.name`."""
        micro_batch, index = divmod(number, self.count)
        return f"micro-batch {micro_batch}, slice {index}"


def sequence_chunks(
    schedule: Schedule,
    config: PipelineConfig,
    layers: PipelineLayer,
    parts_of_sequences: int,
    delays_weights: bool,
) -> Units:
    """Returns the slices of a schedule as units, or whole micro-batches if it cuts none.

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
    if isinstance(lengths, tuple) and schedule.slices not in (1, len(lengths)):
        raise ConfigError(
            "fleetpipe_configs['slices'] has the lengths of another number of slices",
            expected=f"{schedule.slices} lengths, for the slices of {schedule.name}",
            got=f"{len(lengths)} lengths",
            fix="give as many lengths as the plan was made for",
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
    if schedule.slices == 1:
        return WHOLE
    return SequenceChunks(lengths if isinstance(lengths, tuple) else schedule.slices)


#: Layers of Paddle, and those of its tensor parallelism, that see one position at a time.
_PLACE_BY_PLACE = (
    *("Linear", "Embedding", "LayerNorm", "RMSNorm", "Dropout", "Identity"),
    *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
    *("ReLU", "ReLU6", "LeakyReLU", "ELU", "GELU", "Silu", "Swish", "Tanh", "Sigmoid"),
)
#: The functions of these names, in whichever module of Paddle's they are defined.
_FUNCTIONS = {
    getattr(paddle.nn.functional, name)
    for name in ("relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "swish", "tanh", "sigmoid")
}
_PADDLES = ("paddle.nn.", "paddle.distributed.", "fleetpipe.dygraph.tensor_parallel.")


def require_sliceable(entries: Sequence[Any]) -> None:
    """Refuses a list of layers if one may compute something wrong for a slice of a sequence.

    Raises:
        ConfigError: A layer or function is not one of Paddle's that see one position at a time, and
            does not have ``takes_slices = True``.
    """
    functions = (
        (number, function)
        for number, entry in enumerate(entries)
        for function in (getattr(entry, "layer_func", entry), getattr(entry, "forward_func", None))
        if function is not None
    )
    for number, function in functions:
        kind = (
            function
            if isinstance(function, type) or not hasattr(function, "forward")
            else type(function)
        )
        name = getattr(kind, "__name__", repr(kind))
        is_sliceable = kind in _FUNCTIONS or (
            name in _PLACE_BY_PLACE and kind.__module__.startswith(_PADDLES)
        )
        if not is_sliceable and getattr(kind, "takes_slices", False) is not True:
            raise ConfigError(
                f"layer {number}, {name}, does not say that it takes slices of a sequence",
                cause="a schedule with slices gives a layer a part of the sequence at a time; one "
                "whose places see others, as attention does, has to keep what later slices need",
                fix=f"use fleetpipe.contrib.slices in {name}.forward if its places see others, "
                f"and set {name}.takes_slices = True; or choose another schedule_mode. A captured "
                "model has no such layers: build a PipelineLayer",
            )
