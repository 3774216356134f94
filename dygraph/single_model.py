"""The whole list of layers as one Layer of one process, to compare a pipeline with."""

from __future__ import annotations

from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.dygraph import randomness
from fleetpipe.dygraph.shared_layers import Built


class SingleModel(paddle.nn.Layer):
    """All layers of a pipeline's list in one Layer, under the same names."""

    def __init__(self, built: Built) -> None:
        """Takes all layers and functions of the list."""
        super().__init__()
        self._functions = list(built.functions.values())
        built.register(self)

    def forward(self, value: Any) -> Any:
        """Calls each function with what the one before returned."""
        keys = randomness.current()
        for index, function in enumerate(self._functions):
            if keys is not None:
                keys.enter(index, function)
            value = function(value)
        return value
