"""A layer whose weights are in parts, some on each rank, in Fleet's folder: its file has the whole.

The rank that has the first part writes it; each rank reads its own parts, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.layers.vocabulary import EmbeddingInParts, VocabularyPart
from fleetpipe.mesh.groups import Group, SoleGroup
from fleetpipe.mesh.parts import Held, attached_part, joined_on_first
from fleetpipe.paddle_api import paddle


class LayerInParts:
    """The parts that this process has, as their file has them."""

    def __init__(
        self, parts: Mapping[str, Sequence[Tensor]], group: Callable[[], Group] = SoleGroup
    ) -> None:
        """Takes parameters.

        Args:
            parts: Those of each whole in order, by its name in the file.
            group: Returns the ranks that have all parts between them.
        """
        self._group = group
        self._parts = [
            (name, Held(tensor, part.cut))
            for name, tensors in parts.items()
            for tensor in tensors
            if (part := attached_part(tensor)) is not None
        ]

    def held(self) -> dict[str, Held]:
        """Returns a part of each whole, which knows the shape of the whole."""
        return dict(self._parts)

    def set_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Gives the parts their values, which are read one after another."""
        for name, held in self._parts:
            target: Tensor = held.tensor
            values = state[name] if held.cut is None else held.cut.taken_from(state[name])
            native = values.astype(values.dtype.newbyteorder("="), order="C")
            target.set_value(paddle.to_tensor(native))

    def whole(self) -> dict[str, Tensor] | None:
        """Returns what the file has on the first of the ranks; None elsewhere. Collective."""
        return joined_on_first(self._group(), self._parts) or None


def with_whole_head(
    layers: Mapping[int, Layer], shared: Collection[int], group: Callable[[], Group]
) -> dict[int, Layer | LayerInParts]:
    """Returns the layers that have a file, of which a vocabulary head has one for all its parts.

    A head tied to the embedding has none: the embedding's file has the weights.

    Args:
        layers: Those of this process, by number.
        shared: The numbers of those that share weights with others.
        group: Returns the ranks that hold the stages.
    """
    whole: dict[int, Layer | LayerInParts] = {}
    parts: dict[str, list[Tensor]] = {}
    for index, layer in layers.items():
        if isinstance(layer, EmbeddingInParts):
            whole[index] = LayerInParts({"weight": layer.parameters()})
        elif not isinstance(layer, VocabularyPart):
            whole[index] = layer
        elif index not in shared:
            for name, tensor in layer.state_dict().items():
                parts.setdefault(name, []).append(tensor)
            whole[index - layer.number] = LayerInParts(parts, group)
    return whole
