"""Copies of layers that train as the originals do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from fleetpipe.aliases import Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.operations import set_data

_Layers = TypeVar("_Layers")

#: What ranks say of a parameter of theirs, and a copy's optimizer says anew.
_OF_RANKS = ("is_firstly_shared", "main_grad", "no_sync")


def copy_layers(value: _Layers, layers: Iterable[Any], shared: Iterable[Tensor] = ()) -> _Layers:
    """Returns a deep copy of layers, with all that decides how they train.

    Hooks, modes and attributes of layers are copied with them. Paddle copies parameters under other
    names and without further attributes, by which functions of a script choose what decays, and
    parts of a whole are known: here they keep both.

    Args:
        value: A layer, or a container of some.
        layers: The layers in it; others are functions.
        shared: Parameters whose copies have the memory of the originals.
    """
    copies: dict[int, Any] = {}
    with paddle.utils.unique_name.guard():
        for tensor in shared:
            set_data(copy.deepcopy(tensor, copies), tensor.detach())
        copied = copy.deepcopy(value, copies)
    for layer in layers:
        if not isinstance(layer, paddle.nn.Layer):
            continue
        # A layer with a __deepcopy__ of its own may say nothing of what it copies below it.
        for parameter, copied_parameter in zip(layer.parameters(), copies[id(layer)].parameters()):
            for name in vars(parameter).keys() - vars(copied_parameter).keys() - {*_OF_RANKS}:
                setattr(copied_parameter, name, getattr(parameter, name))
            copied_parameter.name = parameter.name
    return copied
