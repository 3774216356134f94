"""The one place that translates between a pipeline's parameters and a whole model's.

A parameter's name is its path in the whole model by global layer index, ``3.weight``. A state dict
of any number of stages has these names. A model written as one class has names of its own: it is
matched by order and shape, which both share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.errors import CheckpointError


class Slot(NamedTuple):
    """One parameter or buffer of the whole model."""

    name: str
    shape: tuple[int, ...]


def slots_of(layer: Any, index: int) -> list[Slot]:
    """Returns the parameters and buffers of layer ``index`` under their lasting names."""
    if not isinstance(layer, paddle.nn.Layer):
        return []
    return [Slot(f"{index}.{name}", tuple(t.shape)) for name, t in layer.state_dict().items()]


class SingleModel(paddle.nn.Layer):
    """All layers of a pipeline's list in one Layer, under the same names."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]]) -> None:
        """Takes the built layers and functions, in order."""
        super().__init__()
        self._functions = list(functions)
        for index, function in enumerate(functions):
            if isinstance(function, paddle.nn.Layer):
                self.add_sublayer(str(index), function)

    def forward(self, value: Any) -> Any:
        """Calls each function with what the one before returned."""
        for function in self._functions:
            value = function(value)
        return value


def names_in(slots: Sequence[Slot], model: Any) -> dict[str, str]:
    """Returns the pipeline's name of each parameter and buffer of a whole model.

    Raises:
        CheckpointError: ``model`` does not fit the pipeline in names, or in order and shape.
    """
    pairs = _matched(slots, _state_of(model))
    return {name: slot.name for slot, (name, _) in zip(slots, pairs)}


def to_pipeline_names(slots: Sequence[Slot], source: Any) -> dict[str, Any]:
    """Returns the tensors of a whole model under the pipeline's names.

    Args:
        slots: All parameters and buffers of the whole pipeline, in order.
        source: A state dict or a Layer: with the pipeline's names, or with the same tensors in the
            same order.

    Raises:
        CheckpointError: The source has other names and does not fit in order and shape.
    """
    pairs = _matched(slots, _state_of(source))
    return {slot.name: tensor for slot, (_, tensor) in zip(slots, pairs)}


def _state_of(source: Any) -> dict[str, Any]:
    return dict(source.state_dict() if isinstance(source, paddle.nn.Layer) else source)


def _matched(slots: Sequence[Slot], state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    if {slot.name for slot in slots} == set(state):
        pairs = [(slot.name, state[slot.name]) for slot in slots]
    else:
        pairs = list(state.items())
    if len(pairs) != len(slots):
        raise CheckpointError(
            "the model and the pipeline do not hold the same number of parameters and buffers",
            expected=f"{len(slots)}: {_listed([slot.name for slot in slots])}",
            got=f"{len(pairs)}: {_listed([name for name, _ in pairs])}",
            fix="build both from the same layers",
        )
    for slot, (name, tensor) in zip(slots, pairs):
        if tuple(tensor.shape) != slot.shape:
            raise CheckpointError(
                f"{name!r} does not fit the pipeline's {slot.name!r}",
                expected=f"shape {list(slot.shape)}",
                got=f"shape {list(tensor.shape)}",
                cause="the model's layers are declared in another order than the pipeline's list",
            )
    return pairs


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", .." if len(names) > most else "")
