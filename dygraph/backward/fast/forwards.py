"""Replaces the ``forward`` of leaf layers that there is a faster way for.

That holds while a stage runs forward, and while a recomputed piece of it runs again; outside of
that nothing is changed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Callable

from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph.backward.adding import Sums
from fleetpipe.dygraph.backward.fast import embedding, linear
from fleetpipe.dygraph.backward.own_state import changes

#: ``forward(*args, **named)`` of one layer.
Forward = Callable[..., Nest]

#: What takes less time, by the forward of a layer's class.
_FORWARDS: dict[object, Callable[..., Nest]] = {linear.plain_forward: linear.forward}

_MISSING = object()


class FastForwards:
    """The leaf layers of a stage for which there is another forward."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        """Finds them among ``layers``."""
        layers = list(layers)
        ways = ((layer, type(layer).forward) for layer in layers)
        self._ways: list[tuple[Layer, object, Forward]] = [
            (layer, plain, functools.partial(_FORWARDS[plain], layer))
            for layer, plain in ways
            if plain in _FORWARDS
        ]
        tables = embedding.tables_of(layers)
        self._ways += [(layer, embedding.plain_forward, one.forward) for layer, one in tables]
        self._tables = [table for _, table in tables]

    def running(self) -> AbstractContextManager[None]:
        """Within it they have it, but for those whose forward a user has replaced."""
        linear.try_waiting()
        return replaced(
            [
                (layer, forward)
                for layer, plain, forward in self._ways
                if type(layer).forward is plain and "forward" not in vars(layer)
            ]
        )

    @contextmanager
    def in_backward(self, sums: Sums) -> Iterator[None]:
        """As :meth:`running`, while the stage's backward runs.

        Args:
            sums: The gradients of the parameters.
        """
        with self.running(), ExitStack() as stack:
            for table in self._tables:
                stack.enter_context(table.adding(sums))
            yield


class _Replacement:
    """Other forwards of some layers, for a while."""

    def __init__(self, forwards: Iterable[tuple[Layer, Forward]]) -> None:
        self._forwards = list(forwards)
        self._before: list[tuple[Layer, object]] = []

    def begin(self) -> None:
        for layer, forward in self._forwards:
            # Around Layer.__setattr__, which looks for parameters first.
            self._before.append((layer, layer.__dict__.get("forward", _MISSING)))
            layer.__dict__["forward"] = forward

    def end(self) -> None:
        while self._before:
            layer, forward = self._before.pop()
            if forward is _MISSING:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = forward


@contextmanager
def replaced(forwards: Iterable[tuple[Layer, Forward]]) -> Iterator[None]:
    """Within it each layer has another forward."""
    replacement = _Replacement(forwards)
    changes.append(replacement)
    try:
        replacement.begin()
        yield
    finally:
        changes.remove(replacement)
        replacement.end()
