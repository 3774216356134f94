"""The parameters and buffers of a captured model under its own names, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.tracing.value import Node
from fleetpipe.dygraph.state.names import Slot
from fleetpipe.dygraph.state.whole_state import ModelState
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import (
    TABLES,
    buffers_in,
    copy_unsaved_names,
    parameters_in,
    sublayers_in,
)
from fleetpipe.paddle_api.tensor import is_parameter


class CapturedState(ModelState):
    """The state of a plain model whose nodes are on several ranks, for one of them.

    Its fully qualified names are the plain model's.
    """

    def __init__(
        self,
        part: Layer,
        slots: Sequence[Slot],
        stages: Mapping[str, Sequence[int]],
        nodes: Sequence[str],
        group: Callable[[], Group],
    ) -> None:
        """Describes a model of which this process holds a part.

        Args:
            part: The part; its sublayers have the names that they have in the model.
            slots: The names and shapes of the whole model.
            stages: By name, the stages that use a parameter or buffer.
            nodes: The names of all nodes, in order.
            group: Returns the group of the ranks that hold the stages.
        """
        self._model = part
        self._slots = list(slots)
        self._built = frozenset(slot.name for slot in slots)
        self._stages = stages
        self._nodes = nodes
        self._group = group
        self._parameters: dict[str, Tensor] = {}

    def keep_parameters(self) -> None:
        """Fixes the current parameters of the part as those of the stages."""
        self._parameters = {n: t for n, t in super()._named_tensors() if is_parameter(t)}

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # A script that is refused for a parameter in another's place saves those that are trained.
        named, kept = super()._named_tensors(), self._parameters
        here = {name: t for name, t in named if name in kept or not is_parameter(t)}
        return iter({**here, **kept}.items())

    def hidden_buffers(self) -> dict[str, Tensor]:
        """Returns none: the names of such buffers would need the number of a layer."""
        return {}

    @property
    def spreads_experts(self) -> bool:
        """Whether ranks of a stage hold different experts: never in a capture."""
        return False

    @property
    def adds_up_uses(self) -> bool:
        """Whether several stages use one weight, so that its gradient is added up by stage."""
        return any(len(users) > 1 for users in self._stages.values())

    def has_several_calls(self, name: str) -> bool:
        """Whether calls of the layer of a tensor may be on several ranks."""
        return len(self._stages[name]) > 1

    def stage_of(self, name: str) -> int | None:
        """Returns the first stage that uses a parameter or buffer."""
        return self._stages[name][0]

    def slots(self) -> list[Slot]:
        """Returns the names and shapes of the whole model."""
        return self._slots

    def positions(self) -> dict[str, int]:
        """Returns the position of each tensor among those of the plain model."""
        return {slot.name: position for position, slot in enumerate(self._slots)}

    def outlines(self) -> list[str]:
        """Returns the names and shapes of the whole model, and its nodes, as text."""
        return [*(f"{slot.name}{list(slot.shape)}" for slot in self._slots), *self._nodes]

    def _qualified_name(self, name: str) -> str:
        return name

    def _state_in(self, model: Layer) -> dict[str, Tensor]:
        """Leaves out the buffers that a forward of the model has registered."""
        state = super()._state_in(model).items()
        return {name: tensor for name, tensor in state if not self._is_late(name, tensor)}


def stages_of(
    model: Layer, nodes_of: Callable[[int], Sequence[Node]], stages: int
) -> dict[str, tuple[int, ...]]:
    """Returns the stages that use each parameter or buffer of a model, by name.

    A tensor that no node uses is in stage 0.
    """
    users: dict[int, list[int]] = {}
    for stage in range(stages):
        part = part_of(model, nodes_of(stage))
        for tensor in {id(t): t for t in part.state_dict().values()}.values():
            users.setdefault(id(tensor), []).append(stage)
    return {name: tuple(users.get(id(tensor), (0,))) for name, tensor in model.state_dict().items()}


def part_of(model: Layer, nodes: Sequence[Node], more: Collection[int] = ()) -> Layer:
    """Returns a Layer with the tensors and sublayers that nodes use, under the model's names.

    Args:
        model: The model, which is not changed.
        nodes: The nodes.
        more: The ids of further parameters and buffers.
    """
    layers = {id(node.function) for node in nodes if node.is_layer}
    tensors = {id(getattr(one.layer, one.name)) for node in nodes for one in node.owned}
    return _part(model, layers, tensors.union(more))


def _part(layer: Layer, layers: set[int], tensors: set[int]) -> Layer:
    """Returns the layer itself if all of it is used, so that it can be found by its identity."""
    part = paddle.nn.Layer()
    whole = True
    for name, sublayer in sublayers_in(layer).items():
        if sublayer is not None:
            kept = sublayer if id(sublayer) in layers else _part(sublayer, layers, tensors)
            whole = whole and (kept is sublayer or not _has_tensors(sublayer))
            if kept is sublayer or any(getattr(kept, table) for table in TABLES):
                sublayers_in(part)[name] = kept
    # Around add_parameter, which refuses a name that Layer has itself.
    for held in (parameters_in, buffers_in):
        for name, tensor in held(layer).items():
            if tensor is not None and id(tensor) in tensors:
                held(part)[name] = tensor
            whole = whole and (tensor is None or name in held(part))
    if whole and any(getattr(part, table) for table in TABLES):
        return layer
    copy_unsaved_names(layer, part)
    return part


def _has_tensors(layer: Layer) -> bool:
    return any(True for _ in chain(layer.parameters(), layer.buffers()))
