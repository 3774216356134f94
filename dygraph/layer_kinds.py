"""Kinds of layers with additional rules in a pipeline, such as mixtures of experts.

A layer is of a kind if one of its sublayers has the name of the kind in ``KINDS``, whose modules
are loaded on demand. The broadcasts here treat experts separately: ranks with copies of the same
stages may hold different experts.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle

#: The :class:`LayerKind` of layers, as ``module:name``, by the name of a sublayer that they have.
KINDS: Mapping[str, str] = {"experts": "fleetpipe.contrib.experts:MIXTURES"}


def is_spread(parameter: Tensor) -> bool:
    """Whether a parameter belongs to an expert, and other ranks of its stage hold other experts.

    Paddle and libraries mark such a parameter by the attribute ``no_sync``.
    """
    return bool(getattr(parameter, "no_sync", False))


def broadcast_copies(state: Mapping[str, Tensor], group: Group, expert_group: Group) -> None:
    """Sets all replicas of a stage to the values of the first one. Collective over both groups.

    Args:
        state: Tensors by name, with the same names and shapes on every replica.
        group: The ranks with replicas of everything but experts.
        expert_group: The ranks with replicas of this rank's experts.
    """
    experts = {name: tensor for name, tensor in state.items() if is_spread(tensor)}
    broadcast_state({n: t for n, t in state.items() if n not in experts}, group)
    broadcast_state(experts, expert_group)


def broadcast_state(state: Mapping[str, Tensor], group: Group) -> None:
    """Sets the tensors of all members of a group to the first member's values. Collective.

    Args:
        state: Tensors by name, with the same names and shapes on every member.
        group: The ranks; their first member sends.
    """
    if group.ranks == 1:
        return
    # Copies, because the tensors may change before the message has left this process.
    copies = None if group.rank else {name: t.detach().clone() for name, t in state.items()}
    first = group.broadcast(copies, 0)
    if group.rank:
        for name, tensor in state.items():
            tensor.set_value(first[name])


class LayerKind:
    """The rules of a kind of layers; a subclass overrides some of the methods.

    Attributes:
        exchanges: Whether such layers exchange values with other ranks in a forward.
    """

    exchanges = False

    def take_built(self, layer: Layer) -> None:
        """Called with each newly built layer of this kind, to check or change it.

        Raises:
            ConfigError: The layer is not allowed in a pipeline.
        """

    def whole_state(self, layer: Layer, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the state that the layer has on one device, by name and in order.

        Tensors that other ranks hold are replaced by tensors of this rank with the same shape and
        dtype: only names, shapes and dtypes mean something.

        Args:
            layer: A layer of this kind.
            state: Its parameters and buffers on this rank, by name.
        """
        return state

    def spreads(self, layer: Layer) -> bool:
        """Whether the ranks that run the same stage hold different parameters of a layer."""
        return False

    def fill_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Called after the last backward of a batch, to give experts without tokens a gradient.

        Args:
            parameters: This rank's parameters by name.
        """


def kinds_in(names: Iterable[str]) -> list[LayerKind]:
    """Returns the kinds of the layers in a model, from paths of its parameters or sublayers."""
    sublayers = {sublayer for name in names for sublayer in name.split(".")}
    return [pkgutil.resolve_name(kind) for name, kind in KINDS.items() if name in sublayers]


def kinds_of(layer: Any) -> list[LayerKind]:
    """Returns the kinds of a layer; a function has none."""
    if not isinstance(layer, paddle.nn.Layer):
        return []
    return kinds_in(path for path, _ in layer.named_sublayers())


def whole_state(layer: Layer) -> dict[str, Tensor]:
    """Returns the parameters and buffers that a layer has on one device, by name, in order."""
    # The method of Layer, because a class may override it with other keys.
    state: dict[str, Tensor] = paddle.nn.Layer.state_dict(layer)
    for kind in kinds_of(layer):
        state = kind.whole_state(layer, state)
    return state


def fill_gradients(parameters: Mapping[str, Tensor]) -> None:
    """Gives a gradient to parameters that have none, such as those of experts without tokens."""
    for kind in kinds_in(parameters):
        kind.fill_gradients(parameters)
