"""The files of a vocabulary head in Fleet's folder of layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.contrib.vocabulary.head import EmbeddingInParts, VocabularyPart
from fleetpipe.dygraph.state.layer_in_parts import LayerInParts
from fleetpipe.mesh.groups import Group


def with_whole_head(
    layers: Mapping[int, Layer], shared: Collection[int], group: Callable[[], Group]
) -> dict[int, Layer | LayerInParts]:
    """Returns the layers that get a file; all parts of a vocabulary head get one file.

    A head tied to the embedding gets none: its weights are in the embedding's file.

    Args:
        layers: The layers of this process, by number.
        shared: The numbers of the layers that share weights with others.
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
