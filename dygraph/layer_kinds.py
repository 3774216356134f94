"""Kinds of layers that add to a pipeline: a table, whose modules are loaded by models with some.

A layer has a kind if one of its sublayers has the kind's name, and a parameter if it is in such a
sublayer.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.paddle_api import paddle

#: The name of sublayers, and the :class:`LayerKind` of layers with some, as ``module:name``.
KINDS: Mapping[str, str] = {"experts": "fleetpipe.contrib.experts.names:MIXTURES"}


class LayerKind:
    """What a kind of layers adds. A subclass has the methods that it needs; these do nothing.

    Attributes:
        exchanges: Whether they exchange values with other ranks in a forward.
    """

    exchanges = False

    def take_built(self, layer: Layer) -> None:
        """Called with a layer that was built just now.

        Raises:
            ConfigError: It cannot be in a pipeline.
        """

    def whole_state(self, layer: Layer, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the state that a layer has on one device, in order, of the one that it has here.

        Beside a name of another rank's stands a tensor of this rank that is like it.
        """
        return state

    def spreads(self, layer: Layer) -> bool:
        """Whether some parameters of a layer are on other ranks of its stage than others."""
        return False

    def fill_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Called with the parameters of a rank, by lasting name, after its last backward."""


def kinds_in(names: Iterable[str]) -> list[LayerKind]:
    """Returns the kinds of layers that have parameters or sublayers of these names."""
    parts = {part for name in names for part in name.split(".")}
    return [pkgutil.resolve_name(kind) for name, kind in KINDS.items() if name in parts]


def kinds_of(layer: Any) -> list[LayerKind]:
    """Returns the kinds of a layer; of a function, none."""
    if not isinstance(layer, paddle.nn.Layer):
        return []
    return kinds_in(path for path, _ in layer.named_sublayers())


def whole_state(layer: Layer) -> dict[str, Tensor]:
    """Returns the names that parameters and buffers of a layer have on one device, in order."""
    # Layer's own method, as everywhere a layer's names are wanted: a class may give other keys.
    state: dict[str, Tensor] = paddle.nn.Layer.state_dict(layer)
    for kind in kinds_of(layer):
        state = kind.whole_state(layer, state)
    return state


def fill_gradients(parameters: Mapping[str, Tensor]) -> None:
    """Gives parameters the gradients that they have in a layer which is whole on one device."""
    for kind in kinds_in(parameters):
        kind.fill_gradients(parameters)
