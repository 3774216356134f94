"""Loads static graph at a script's first ``device_guard``, or by ``fleet.init``.

It also replaces those of Fleet's functions for parameter servers that many static scripts call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from fleetpipe.errors import ConfigError
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.static import swap_switch_device, switch_device

#: The hook in Paddle's ``device_guard``; None before :func:`load_at_first_device_guard`.
_guard: _FirstGuard | None = None


def static_graph() -> Any:
    """Loads and returns ``fleetpipe.static``."""
    return importlib.import_module("fleetpipe.static")


class _FirstGuard:
    """Called by Paddle's ``device_guard``; loads ``fleetpipe.static`` at the first one.

    Attributes:
        is_pending: Whether the next ``device_guard`` makes the change.
    """

    def __init__(self) -> None:
        self.is_pending = True
        self._original = swap_switch_device(self)

    def __call__(self, device: str | None) -> object:
        if not self.is_pending:
            return self._original(device)
        self.is_pending = False
        static_graph().install()
        return switch_device(device)


def load_at_first_device_guard() -> None:
    """Makes the next ``device_guard`` load ``fleetpipe.static``, which changes Paddle for it.

    ``fleet.shutdown`` undoes the changes.
    """
    global _guard
    if _guard is None:
        _guard = _FirstGuard()
    _guard.is_pending = True


def _replacement_of(name: str, fix: str | None = None) -> Callable[..., Any]:
    """Returns a replacement of a function of Fleet's for parameter servers.

    Outside of a static job it calls Fleet's function.

    Args:
        name: The function of Fleet's.
        fix: The advice of the error that it raises in a static job; None to do nothing there.
    """
    original: Callable[..., Any] = getattr(paddle_fleet, name)

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        """Calls Fleet's function, but in a static job does nothing or raises an error."""
        if paddle.in_dynamic_mode() or current_job() is None:
            return original(*arguments, **named)
        if fix is not None:
            raise ConfigError(
                f"fleet.{name} saves from parameter servers, of which a pipeline has none", fix=fix
            )
        return None

    return call


init_worker = _replacement_of("init_worker")
stop_worker = _replacement_of("stop_worker")
save_persistables = _replacement_of(
    "save_persistables", "paddle.static.save(program, path) on every rank"
)
save_inference_model = _replacement_of(
    "save_inference_model",
    "fleetpipe.static.save_inference_model(prefix, feed_vars, fetch_vars, exe) on every rank",
)
