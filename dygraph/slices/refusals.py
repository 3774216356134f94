"""Which layers take a slice of a sequence in the place of a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle

#: Layers of Paddle, and those of its tensor parallelism, that see one place at a time.
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
    """Refuses a list of layers of which one might not be right for a slice of a sequence.

    Raises:
        ConfigError: A layer, or function, is neither of Paddle's that see one place at a time, nor
            says ``takes_slices = True``.
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
                fix=f"use fleetpipe.dygraph.slices in {name}.forward if its places see others, "
                f"and set {name}.takes_slices = True; or choose another schedule_mode. A captured "
                "model has no such layers: build a PipelineLayer",
            )
