"""Layers: their hooks, tables of parameters and buffers; alike in 2.6.2 and 3.3.x."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle.jit.dy2static.program_translator import StaticFunction

from fleetpipe.aliases import Layer, Tensor


def forward_hooks(layer: Layer) -> list[dict[int, Any]]:
    """Returns the hooks around a layer's forward: those before it, and those after it."""
    attributes = vars(layer)
    return [attributes["_forward_pre_hooks"], attributes["_forward_post_hooks"]]


def is_patched(layer: Layer) -> bool:
    """Whether a layer has hooks around its forward, or another forward than its class."""
    attributes = vars(layer)
    return bool(
        attributes["_forward_pre_hooks"]
        or attributes["_forward_post_hooks"]
        or "forward" in attributes
    )


def state_slots(layer: Layer) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yields where a layer itself has state that its forward may change: a dict and a name in it.

    These are its buffers, and the vectors among its parameters that are not trained, which is
    where some layers have statistics.
    """
    attributes = vars(layer)
    for name, tensor in attributes["_buffers"].items():
        # The one that LSTM and its kin have for GPUs is nowhere on a CPU.
        if tensor is not None and tensor._is_initialized():
            yield attributes["_buffers"], name
    for name, tensor in attributes["_parameters"].items():
        if tensor is not None and tensor.stop_gradient and tensor.ndim <= 1:
            yield attributes["_parameters"], name


def is_static(layer: Layer) -> bool:
    """Whether ``paddle.jit.to_static`` makes a static graph of a layer's forward."""
    return isinstance(layer.forward, StaticFunction)
