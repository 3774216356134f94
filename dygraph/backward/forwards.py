"""Replaces the forwards of some layers while a stage runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph.backward.own_state import changes
from fleetpipe.errors import ConfigError

#: ``forward(*args, **named)`` of one layer.
Forward = Callable[..., Nest]

_MISSING = object()


class _Replacement:
    """Replaces the forwards of some layers, and restores them."""

    def __init__(self, forwards: Iterable[tuple[Layer, Forward]]) -> None:
        self._forwards = list(forwards)
        self._before: list[tuple[Layer, object]] = []

    def begin(self) -> None:
        for layer, forward in self._forwards:
            # Around Layer.__setattr__, which looks for parameters first.
            self._before.append((layer, layer.__dict__.get("forward", _MISSING)))
            layer.__dict__["forward"] = forward

    def require_in_place(self) -> None:
        """Refuses a forward that the user has set meanwhile, since restoring would remove it."""
        for layer, forward in self._forwards:
            if layer.__dict__.get("forward", forward) is not forward:
                raise ConfigError(
                    f"the forward of a layer was replaced while its stage ran: {type(layer)}",
                    fix="replace it before the batch",
                )

    def end(self) -> None:
        while self._before:
            layer, forward = self._before.pop()
            if forward is _MISSING:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = forward


@contextmanager
def with_forwards(forwards: Iterable[tuple[Layer, Forward]]) -> Iterator[None]:
    """While it is open, each layer runs the given forward."""
    replacement = _Replacement(forwards)
    changes.append(replacement)
    try:
        replacement.begin()
        yield
        replacement.require_in_place()
    finally:
        changes.remove(replacement)
        replacement.end()
