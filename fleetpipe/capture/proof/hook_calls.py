"""Counts the calls of hooks that a user has put on layers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetpipe.aliases import Layer
from fleetpipe.capture.tracing.mark import is_noting
from fleetpipe.dygraph.backward.recompute import rerunning
from fleetpipe.paddle_api.layer import forward_hooks

#: By the path of a layer, how often its hooks were called.
Calls = Counter[str]

_pauses: list[None] = []


@contextmanager
def count_hook_calls(model: Layer) -> Iterator[Calls]:
    """While it is open, calls of the hooks of all sublayers are counted.

    Hooks of the model itself are left out: their operations are captured.
    """
    calls: Calls = Counter()
    replaced: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for path, layer in model.named_sublayers():
        for hooks in forward_hooks(layer):
            replaced.append((hooks, dict(hooks)))
            for key, hook in hooks.items():
                hooks[key] = functools.partial(_count_call, calls, path, hook)
    try:
        yield calls
    finally:
        for hooks, before in replaced:
            hooks.update((key, hook) for key, hook in before.items() if key in hooks)


@contextmanager
def pause_counting() -> Iterator[None]:
    """While it is open, calls of hooks are not counted, as a proof only measures rounding."""
    _pauses.append(None)
    try:
        yield
    finally:
        _pauses.pop()


def _count_call(calls: Calls, path: str, hook: Callable[..., Any], *args: Any, **named: Any) -> Any:
    # A proof may meet rows that have to be captured first, and recompute runs layers again.
    calls[path] += not (is_noting() or _pauses or rerunning())
    return hook(*args, **named)
