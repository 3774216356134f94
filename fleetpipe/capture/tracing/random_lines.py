"""Finds the lines that draw random numbers from Python's and NumPy's generators.

A capture does not see such numbers, and would repeat the first ones for ever.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from fleetpipe.aliases import Layer
from fleetpipe.capture.tracing.place import is_users, user_place

#: Modules whose lines draw for those that call them.
_DRAWING = ("random", "numpy", "secrets")

#: What a function of Python's that follows frames returns.
_Follow = Callable[[FrameType, str, Any], Any]


class Generators:
    """The generators of Python and NumPy, of a model, and of its classes' modules."""

    def __init__(self, model: Layer) -> None:
        """Collects generators from the attributes of layers, and from lists and dicts in them."""
        layers = model.sublayers(include_self=True)
        modules = {sys.modules.get(kind.__module__) for kind in {*map(type, layers)}}
        values: list[Any] = []
        for holder in (*layers, *modules - {None}):
            for value in vars(holder).values():
                several = isinstance(value, (list, tuple, dict)) and not hasattr(value, "_fields")
                items = value.values() if isinstance(value, dict) else value
                values += items if several else [value]
        self._python = [one for one in values if isinstance(one, random.Random)]
        self._numpy = [
            one for one in values if isinstance(one, (np.random.Generator, np.random.RandomState))
        ]

    def states(self) -> object:
        """Returns a value that compares unequal when any of their states has changed."""
        return (
            random.getstate(),
            pickle.dumps(np.random.get_state()),
            [one.getstate() for one in self._python if not isinstance(one, random.SystemRandom)],
            [pickle.dumps(_bits(one).state) for one in self._numpy],
        )


def _bits(generator: Any) -> Any:
    """Returns the bit source of a NumPy generator."""
    return getattr(generator, "bit_generator", None) or generator._bit_generator


class RandomLines:
    """Reports the lines of a run that draw random numbers, except those within nodes."""

    def __init__(self, generators: Generators, report: Callable[[str], None]) -> None:
        """Prepares to watch a run.

        Args:
            generators: The generators to watch.
            report: Called with file and line of each line that draws.
        """
        self._states, self._last = generators.states, generators.states()
        self._report = report
        self._lines: dict[FrameType, int] = {}
        self._inside = False

    @contextmanager
    def node(self) -> Iterator[Callable[[], bool]]:
        """Allows random numbers while it is open; yields a function that says whether any came."""
        self._look(user_place)
        self._inside = True
        before = self._last
        try:
            yield lambda: self._last != before
        finally:
            self._inside = False
            self._last = self._states()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches lines while this context is open."""
        before = sys.gettrace()
        sys.settrace(self._begin)
        try:
            yield
        finally:
            sys.settrace(before)

    def _begin(self, frame: FrameType, event: str, value: Any) -> _Follow | None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        follows = not self._inside and is_users(frame) and module not in _DRAWING
        return self._line if follows else None

    def _line(self, frame: FrameType, event: str, value: Any) -> _Follow:
        if not self._inside:
            # What a line has done shows at the next one, or within what it calls.
            self._look(lambda: self._place(frame))
            self._lines[frame] = frame.f_lineno
        return self._line

    def _place(self, frame: FrameType) -> str:
        """Returns file and line of the last watched line."""
        line = self._lines.get(frame)
        while line is None and frame.f_back is not None:
            frame = frame.f_back
            line = frame.f_lineno if frame in self._lines else None
        return f"{frame.f_code.co_filename}:{line}"

    def _look(self, place: Callable[[], str]) -> None:
        states = self._states()
        if states != self._last:
            self._last = states
            self._report(place())
