"""The private names of Paddle that the training loop needs, for paddlepaddle 2.6.2 and 3.3.x."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from fleetpipe.aliases import Optimizer, Scheduler
from fleetpipe.paddle_api import paddle

#: Where Paddle's callbacks keep what they know; they have no state dicts.
_KEPT: dict[type, tuple[str, ...]] = {
    paddle.callbacks.EarlyStopping: ("wait_epoch", "best_value", "stopped_epoch"),
    paddle.callbacks.ReduceLROnPlateau: ("cooldown_counter", "wait", "best", "epoch"),
}


def prefix(optimizer: Optimizer) -> str:
    """Returns what stands before the kind in the names of an optimizer's state."""
    return "" if optimizer._name is None else f"{optimizer._name}_"


def scheduler_of(optimizer: Optimizer) -> Scheduler:
    """Returns the schedule of an optimizer's learning rate; None where it is a number."""
    rate = optimizer._learning_rate
    return rate if hasattr(rate, "set_state_dict") else None


def state_of(callback: Any) -> dict[str, Any]:
    """Returns what a callback knows of the training so far; nothing of one that says nothing."""
    if hasattr(callback, "state_dict"):
        return dict(callback.state_dict())
    return {name: getattr(callback, name) for name in _names_of(callback)}


def set_state(callback: Any, state: Mapping[str, Any]) -> None:
    """Gives a callback what :func:`state_of` returned."""
    if hasattr(callback, "set_state_dict"):
        callback.set_state_dict(state)
    for name in _names_of(callback):
        setattr(callback, name, state[name])


def _names_of(callback: Any) -> tuple[str, ...]:
    """Returns the attributes in which one of Paddle's callbacks keeps what it knows."""
    return next((names for kind, names in _KEPT.items() if isinstance(callback, kind)), ())


def checked_amp(
    configs: str | dict[str, Any] | None, optimizer: Optimizer
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns level, lists and scaling, as ``paddle.Model`` checks and takes them apart.

    Raises:
        ValueError: They are of no form that it knows.
        AssertionError: The optimizer's clip does not go with them.
    """
    adapter = SimpleNamespace()
    check: Any = paddle.Model._prepare_amp
    check(SimpleNamespace(_adapter=adapter, _optimizer=optimizer), configs)
    return adapter._amp_level, adapter._amp_custom_lists, adapter._amp_configs
