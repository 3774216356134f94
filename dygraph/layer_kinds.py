"""Kinds of layers with additional rules in a pipeline: a table of modules to load on demand.

A layer has a kind if the name of one of its sublayers is the kind's, and a parameter if it is in
such a sublayer.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.paddle_api import paddle

#: The name of sublayers, and the :class:`LayerKind` of layers with some, as ``module:name``.
KINDS: Mapping[str, str] = {"experts": "fleetpipe.contrib.experts.mixture_kind:MIXTURES"}


class LayerKind:
    """The rules of a kind of layers. A subclass overrides the methods it needs; these do nothing.

    Attributes:
        exchanges: Whether such layers exchange values with other ranks in a forward.
    """

    exchanges = False

    def take_built(self, layer: Layer) -> None:
        """Called with a newly built layer.

        Raises:
            ConfigError: The layer is not allowed in a pipeline.
        """

    def whole_state(self, layer: Layer, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the layer's state on one device, in order, made from its state on this rank.

        For a name of another rank, it has a tensor of this rank with the same shape and dtype.
        """
        return state

    def spreads(self, layer: Layer) -> bool:
        """Whether the ranks of a stage have different parameters of a layer."""
        return False

    def fill_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Called after a rank's last backward, with its parameters by fully qualified name."""


def kinds_in(names: Iterable[str]) -> list[LayerKind]:
    """Returns the kinds of layers that have parameters or sublayers with these names."""
    parts = {part for name in names for part in name.split(".")}
    return [pkgutil.resolve_name(kind) for name, kind in KINDS.items() if name in parts]


def kinds_of(layer: Any) -> list[LayerKind]:
    """Returns the kinds of a layer; a function has none."""
    if not isinstance(layer, paddle.nn.Layer):
        return []
    return kinds_in(path for path, _ in layer.named_sublayers())


def whole_state(layer: Layer) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a layer by their names on one device, in order."""
    # Layer's own method, as everywhere a layer's names are wanted: a class may give other keys.
    state: dict[str, Tensor] = paddle.nn.Layer.state_dict(layer)
    for kind in kinds_of(layer):
        state = kind.whole_state(layer, state)
    return state


def fill_gradients(parameters: Mapping[str, Tensor]) -> None:
    """Gives parameters the gradients that they would have if their layer were whole."""
    for kind in kinds_in(parameters):
        kind.fill_gradients(parameters)
