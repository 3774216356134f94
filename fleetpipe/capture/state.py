"""The parameters and buffers of a captured model under its own names, whoever holds them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.value import Node
from fleetpipe.dygraph.state.names import Slot
from fleetpipe.dygraph.state.whole_state import ModelState
from fleetpipe.transport import Group


class CapturedState(ModelState):
    """The state of a plain model whose nodes are on several ranks, as one of them sees it.

    The lasting names are the plain model's.
    """

    def __init__(
        self,
        part: Layer,
        slots: Sequence[Slot],
        stages: Mapping[str, Collection[int]],
        group: Callable[[], Group],
    ) -> None:
        """Describes a model of which this process holds a part.

        Args:
            part: That part; its sublayers have the names that they have in the model.
            slots: The names and shapes of the whole model.
            stages: By name, the stages that use a parameter or buffer.
            group: Returns the ranks that hold the stages.
        """
        self._model = part
        self._slots = list(slots)
        self._stages = stages
        self._group = group

    def hidden_buffers(self) -> dict[str, Tensor]:
        """Returns none: the buffers that no state dict has go by no number of a layer."""
        return {}

    @property
    def adds_up_uses(self) -> bool:
        """Whether several stages use one weight: its gradient is added up stage by stage."""
        return any(len(users) > 1 for users in self._stages.values())

    def slots(self) -> list[Slot]:
        """Returns the names and shapes of the whole model."""
        return self._slots

    def places(self) -> dict[str, int]:
        """Returns where the plain model has each of its tensors."""
        return {slot.name: place for place, slot in enumerate(self._slots)}

    def outlines(self) -> list[str]:
        """Returns the names and shapes of the whole model as text."""
        return [f"{slot.name}{list(slot.shape)}" for slot in self._slots]

    def _lasting_name(self, name: str) -> str:
        return name


def used_by(nodes: Sequence[Node]) -> tuple[set[int], set[int]]:
    """Returns the ids of the layers that nodes call, and of the tensors that they take besides."""
    layers = {id(node.function) for node in nodes if node.is_layer}
    tensors = {id(getattr(one.layer, one.name)) for node in nodes for one in node.owned}
    return layers, tensors


def part_of(layer: Layer, layers: set[int], tensors: set[int]) -> Layer | None:
    """Returns a layer with those sublayers and tensors alone, under the same names; None if empty.

    Args:
        layer: The layer. It stays as it is.
        layers: The ids of sublayers that are kept as they are.
        tensors: The ids of parameters and buffers that are kept in layers that are not.
    """
    if id(layer) in layers:
        return layer
    part = paddle.nn.Layer()
    for name, sublayer in layer._sub_layers.items():
        kept = None if sublayer is None else part_of(sublayer, layers, tensors)
        if kept is not None:
            part.add_sublayer(name, kept)
    for name, parameter in layer._parameters.items():
        if parameter is not None and id(parameter) in tensors:
            part.add_parameter(name, parameter)
    for name, buffer in layer._buffers.items():
        if buffer is not None and id(buffer) in tensors:
            persistable = name not in layer._non_persistable_buffer_names_set
            part.register_buffer(name, buffer, persistable)
    return part if part._sub_layers or part._parameters or part._buffers else None
