"""Finds the lines that draw random numbers from generators of Python's and of NumPy's.

No operation of Paddle's shows them: what was drawn at the capture would stay as it was.
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
    """Python's and NumPy's own generators, those that a model has, and its classes' modules."""

    def __init__(self, model: Layer) -> None:
        """Looks for them: among the attributes of layers, and in lists and dicts there."""
        layers = model.sublayers(include_self=True)
        modules = {sys.modules.get(kind.__module__) for kind in {*map(type, layers)}}
        held: list[Any] = []
        for holder in (*layers, *modules - {None}):
            for value in vars(holder).values():
                several = isinstance(value, (list, tuple, dict)) and not hasattr(value, "_fields")
                items = value.values() if isinstance(value, dict) else value
                held += items if several else [value]
        self._python = [one for one in held if isinstance(one, random.Random)]
        self._numpy = [
            one for one in held if isinstance(one, (np.random.Generator, np.random.RandomState))
        ]

    def states(self) -> object:
        """Returns what all their states are, to be compared."""
        return (
            random.getstate(),
            pickle.dumps(np.random.get_state()),
            [one.getstate() for one in self._python if not isinstance(one, random.SystemRandom)],
            [pickle.dumps(_bits(one).state) for one in self._numpy],
        )


def _bits(generator: Any) -> Any:
    """Returns what a generator of NumPy's draws bits from."""
    return getattr(generator, "bit_generator", None) or generator._bit_generator


class Draws:
    """Follows the lines of a run, but those within nodes."""

    def __init__(self, generators: Generators, drawn: Callable[[str], None]) -> None:
        """Begins before a run.

        Args:
            generators: What may be drawn from.
            drawn: Called with file and line for each that draws.
        """
        self._states, self._last = generators.states, generators.states()
        self._drawn = drawn
        self._lines: dict[FrameType, int] = {}
        self._inside = False

    @contextmanager
    def node(self) -> Iterator[Callable[[], bool]]:
        """Within it anything may draw; what it gives says whether something has."""
        self._look(user_place)
        self._inside = True
        before = self._last
        try:
            yield lambda: self._last != before
        finally:
            self._inside = False
            self._last = self._states()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within it lines are followed."""
        before = sys.gettrace()
        sys.settrace(self._begun)
        try:
            yield
        finally:
            sys.settrace(before)

    def _begun(self, frame: FrameType, event: str, value: Any) -> _Follow | None:
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
        """Returns file and line of the last line that was followed."""
        line = self._lines.get(frame)
        while line is None and frame.f_back is not None:
            frame = frame.f_back
            line = frame.f_lineno if frame in self._lines else None
        return f"{frame.f_code.co_filename}:{line}"

    def _look(self, place: Callable[[], str]) -> None:
        states = self._states()
        if states != self._last:
            self._last = states
            self._drawn(place())
