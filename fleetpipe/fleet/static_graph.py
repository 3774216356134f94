"""Loads static graph at a script's first ``device_guard``, or by ``fleet.init``.

Also has those of Fleet's functions for parameter servers that many static scripts call.
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

_guard: _FirstGuard | None = None


def static_graph() -> Any:
    """Loads and returns ``fleetpipe.static``."""
    return importlib.import_module("fleetpipe.static")


class _FirstGuard:
    """Changes Paddle for static graph when a script first enters a ``device_guard``."""

    def __init__(self) -> None:
        self.awaited = True
        self._original = swap_switch_device(self)

    def __call__(self, device: str | None) -> object:
        if not self.awaited:
            return self._original(device)
        self.awaited = False
        static_graph().install()
        return switch_device(device)


def await_guard() -> None:
    """Makes the next ``device_guard`` load static graph; ``fleet.shutdown`` undoes that."""
    global _guard
    if _guard is None:
        _guard = _FirstGuard()
    _guard.awaited = True


def _answer_for(name: str, fix: str | None = None) -> Callable[..., Any]:
    """Returns a function of Fleet's that in a static job does nothing, or with a fix is refused."""
    original: Callable[..., Any] = getattr(paddle_fleet, name)

    @functools.wraps(original)
    def answer(*arguments: Any, **named: Any) -> Any:
        if paddle.in_dynamic_mode() or current_job() is None:
            return original(*arguments, **named)
        if fix is not None:
            raise ConfigError(
                f"fleet.{name} saves from parameter servers, of which a pipeline has none", fix=fix
            )
        return None

    return answer


init_worker = _answer_for("init_worker")
stop_worker = _answer_for("stop_worker")
save_persistables = _answer_for(
    "save_persistables", "paddle.static.save(program, path) on every rank"
)
save_inference_model = _answer_for(
    "save_inference_model",
    "fleetpipe.static.save_inference_model(prefix, feed_vars, fetch_vars, exe) on every rank",
)
