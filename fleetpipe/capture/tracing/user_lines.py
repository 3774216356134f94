"""Finds lines of the user's code: for messages, where a stage begins, and which draw numbers.

``fleetpipe.pipe_split`` is a line in a model's forward at which a stage begins. ``RandomLines``
finds lines that draw from Python's and NumPy's generators: a capture does not see such numbers, and
would repeat those of the captured run.
"""

from __future__ import annotations

import dis
import inspect
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, TracebackType
from typing import Any

import numpy as np

from fleetpipe.aliases import Layer

#: The functions that :func:`pipe_split` calls.
_listening: list[Callable[[], None]] = []

#: Packages whose frames are not the user's; the last wraps functions of Paddle 2.6.2.
_NOT_THE_USERS = ("paddle", "fleetpipe", "numpy", "decorator")
#: Functions of Paddle that read numbers only to check that indices or lengths are within bounds.
_CHECKING = {"take_along_axis", "masked_scatter"}
#: Paddle's own models count as a user's code.
_MODELS = "paddle.vision.models."

#: Modules whose lines count as those of their callers.
_DRAWING = ("random", "numpy", "secrets")

#: The type of a function for ``sys.settrace``.
_Follow = Callable[[FrameType, str, Any], Any]


def pipe_split() -> None:
    """Starts a stage at this line of a forward that ``fleetpipe.pipeline`` captures.

    It counts if ``split_spec`` is None; it does nothing when a model runs by itself.

    Raises:
        CaptureError: It is in a sublayer that is captured as a whole.
    """
    for note in _listening:
        note()


def is_noting() -> bool:
    """Whether a forward is being captured."""
    return bool(_listening)


@contextmanager
def noting(note: Callable[[], None]) -> Iterator[None]:
    """While this context is open, each call of :func:`pipe_split` calls ``note``."""
    _listening.append(note)
    try:
        yield
    finally:
        _listening.remove(note)


def is_users(frame: FrameType) -> bool:
    """Whether a frame belongs neither to Paddle nor to fleetpipe."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith(_MODELS) or name.partition(".")[0] not in _NOT_THE_USERS


def user_place() -> str:
    """Returns file and line of the user's innermost frame."""
    for frame, line in traceback.walk_stack(None):
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{line}"
    return "?"


def asked_by_paddle() -> bool:
    """Whether the innermost frame outside of fleetpipe and NumPy is Paddle's."""
    for frame, _ in traceback.walk_stack(None):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("fleetpipe", "numpy"):
            return not is_users(frame)
    return False


def only_checked() -> bool:
    """Whether Paddle's running function reads numbers only to check them."""
    for frame, _ in traceback.walk_stack(None):
        if is_users(frame):
            return False
        if frame.f_code.co_name in _CHECKING:
            return True
    return False


def only_raises() -> bool:
    """Whether the user's innermost frame tests a tensor, and raises an error if it fails."""
    frame = next((frame for frame, _ in traceback.walk_stack(None) if is_users(frame)), None)
    return frame is not None and _raises_after(frame.f_code, frame.f_lasti)


@cache
def _raises_after(code: CodeType, offset: int) -> bool:
    """Whether a test at this offset of a code is that of ``if not ..: raise`` or ``assert``."""
    steps = {step.offset: step for step in dis.get_instructions(code)}
    test = next((s for at, s in steps.items() if at >= offset and s.opname != "TO_BOOL"), None)
    if test is None or not test.opname.startswith("POP_JUMP"):
        return False
    passed = [step for at, step in steps.items() if test.offset < at < test.argval]
    return bool(passed) and passed[-1].opname == "RAISE_VARARGS"


def raised_at(where: TracebackType | None) -> str:
    """Returns file and line of the user's innermost frame that an error went through."""
    place = "?"
    for frame, line in traceback.walk_tb(where):
        if is_users(frame):
            place = f"{frame.f_code.co_filename}:{line}"
    return place


def forward_place(model: Layer) -> str | None:
    """Returns file and line of a model's forward; None if it has no source."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


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
        kinds = (np.random.Generator, np.random.RandomState)
        self._numpy: list[Any] = [one for one in values if isinstance(one, kinds)]

    def states(self) -> object:
        """Returns a value that compares unequal when any of their states has changed."""
        sources = [getattr(g, "bit_generator", None) or g._bit_generator for g in self._numpy]
        return (
            random.getstate(),
            pickle.dumps(np.random.get_state()),
            [one.getstate() for one in self._python if not isinstance(one, random.SystemRandom)],
            [pickle.dumps(source.state) for source in sources],
        )


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
        """Allows random numbers while it is open; the yielded function tells if any were drawn."""
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
        """Follows the lines of a new frame, if it is the user's; see ``sys.settrace``."""
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        follows = not self._inside and is_users(frame) and module not in _DRAWING
        return self._line if follows else None

    def _line(self, frame: FrameType, event: str, value: Any) -> _Follow:
        if not self._inside:
            # The states show at the next line what the last line has drawn.
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
        """Reports the line that ``place`` returns, if a generator's state has changed."""
        states = self._states()
        if states != self._last:
            self._last = states
            self._report(place())
