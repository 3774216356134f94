"""Callbacks of ``paddle.Model``, which have no state dicts; alike in 2.6.2 and 3.3.x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetpipe.paddle_api import paddle

#: Where Paddle's callbacks keep what they know; they have no state dicts.
_KEPT: dict[type, tuple[str, ...]] = {
    paddle.callbacks.EarlyStopping: ("wait_epoch", "best_value", "stopped_epoch"),
    paddle.callbacks.ReduceLROnPlateau: ("cooldown_counter", "wait", "best", "epoch"),
}


def callback_state(callback: Any) -> dict[str, Any]:
    """Returns what a callback knows of the training so far; nothing of one that says nothing."""
    if hasattr(callback, "state_dict"):
        return dict(callback.state_dict())
    return {name: getattr(callback, name) for name in _names_of(callback)}


def set_callback_state(callback: Any, state: Mapping[str, Any]) -> None:
    """Gives a callback what :func:`callback_state` returned."""
    if hasattr(callback, "set_state_dict"):
        callback.set_state_dict(state)
    for name in _names_of(callback):
        setattr(callback, name, state[name])


def _names_of(callback: Any) -> tuple[str, ...]:
    """Returns the attributes in which one of Paddle's callbacks keeps what it knows."""
    return next((names for kind, names in _KEPT.items() if isinstance(callback, kind)), ())
