"""Finds lines of the user's code on the stack, for messages and for what a capture must know.

A capture records the nodes of a model's forward: calls of sublayers, and operations outside of any.
``fleetpipe.pipe_split`` marks a line of a model's forward at which a stage begins. ``RandomLines``
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

#: The functions that :func:`pipe_split` calls: one for each capture that is running.
_pipe_split_callbacks: list[Callable[[], None]] = []

#: Packages whose frames are not the user's; the last wraps functions of Paddle 2.6.2.
_NOT_THE_USERS = ("paddle", "fleetpipe", "numpy", "decorator")
#: Functions of Paddle that read numbers only to check that indices or lengths are within bounds.
_CHECKING = {"take_along_axis", "masked_scatter"}
#: The prefix of Paddle's own models, whose code counts as the user's.
_MODELS = "paddle.vision.models."

#: Modules that draw random numbers for their callers: the caller's line is reported.
_DRAWING = ("random", "numpy", "secrets")

#: The type of a trace function for ``sys.settrace``.
_TraceFunction = Callable[[FrameType, str, Any], Any]


def pipe_split() -> None:
    """Starts a stage at this line of a forward that ``fleetpipe.pipeline`` captures.

    The call has no effect if ``split_spec`` is given, or when a model runs by itself.

    Raises:
        CaptureError: The call is made in a sublayer that is captured as a whole.
    """
    for callback in _pipe_split_callbacks:
        callback()


def is_capturing() -> bool:
    """Returns whether any forward is being captured now."""
    return bool(_pipe_split_callbacks)


@contextmanager
def on_pipe_split(callback: Callable[[], None]) -> Iterator[None]:
    """Makes each call of :func:`pipe_split` call ``callback`` while this context is open."""
    _pipe_split_callbacks.append(callback)
    try:
        yield
    finally:
        _pipe_split_callbacks.remove(callback)


def is_users(frame: FrameType) -> bool:
    """Returns whether a stack frame is the user's: of no package in ``_NOT_THE_USERS``."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith(_MODELS) or name.partition(".")[0] not in _NOT_THE_USERS


def user_location() -> str:
    """Returns ``file:line`` of the user's innermost frame on the stack; ``?`` without one."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{line}"
    return "?"


def called_by_paddle() -> bool:
    """Returns whether the innermost frame outside of fleetpipe and NumPy is Paddle's."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("fleetpipe", "numpy"):
            return not is_users(frame)
    return False


def in_checking_function() -> bool:
    """Returns whether a function of ``_CHECKING`` runs, which reads numbers only to check them."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if is_users(frame):
            return False
        if frame.f_code.co_name in _CHECKING:
            return True
    return False


def tests_before_raise() -> bool:
    """Returns whether the user's innermost frame is at a test that raises an error if it fails."""
    stack = traceback.walk_stack(sys._getframe())
    frame = next((frame for frame, _ in stack if is_users(frame)), None)
    return frame is not None and _raises_after(frame.f_code, frame.f_lasti)


@cache
def _raises_after(code: CodeType, offset: int) -> bool:
    """Returns whether the test at an offset in bytecode is ``if not ..: raise`` or ``assert``."""
    steps = {step.offset: step for step in dis.get_instructions(code)}
    test = next((s for at, s in steps.items() if at >= offset and s.opname != "TO_BOOL"), None)
    if test is None or not test.opname.startswith("POP_JUMP"):
        return False
    skipped = [step for at, step in steps.items() if test.offset < at < test.argval]
    return bool(skipped) and skipped[-1].opname == "RAISE_VARARGS"


def raising_location(error_traceback: TracebackType | None) -> str:
    """Returns ``file:line`` of the user's innermost frame in a traceback; ``?`` without one."""
    location = "?"
    for frame, line in traceback.walk_tb(error_traceback):
        if is_users(frame):
            location = f"{frame.f_code.co_filename}:{line}"
    return location


def forward_location(model: Layer) -> str | None:
    """Returns ``file:line`` of the begin of a model's forward; None if it is not Python code."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


class Generators:
    """The random generators of Python's and NumPy's that a model's forward may draw from.

    These are the two global generators, and those in attributes of the model's layers and of the
    modules that define the layers' classes.
    """

    def __init__(self, model: Layer) -> None:
        """Collects generators from attributes, and from lists, tuples and dicts in them."""
        layers = model.sublayers(include_self=True)
        modules = {sys.modules.get(kind.__module__) for kind in {*map(type, layers)}}
        values: list[Any] = []
        for holder in (*layers, *modules - {None}):
            for value in vars(holder).values():
                if isinstance(value, dict):
                    values += value.values()
                elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                    values += value
                else:
                    values.append(value)
        #: The generators of Python's and of NumPy's, without the global ones.
        self._python = [value for value in values if isinstance(value, random.Random)]
        numpy_classes = (np.random.Generator, np.random.RandomState)
        self._numpy: list[Any] = [value for value in values if isinstance(value, numpy_classes)]

    def states(self) -> object:
        """Returns a value that changes when the state of any of the generators changes."""
        sources = [getattr(g, "bit_generator", None) or g._bit_generator for g in self._numpy]
        return (
            random.getstate(),
            pickle.dumps(np.random.get_state()),
            [g.getstate() for g in self._python if not isinstance(g, random.SystemRandom)],
            [pickle.dumps(source.state) for source in sources],
        )


class RandomLines:
    """Reports each line of a model's forward that draws random numbers outside of nodes.

    A stage calls a node again for each batch, and so draws anew inside of it; numbers drawn outside
    would stay those of the captured run. Python calls this object before each line of the user's
    code (``sys.settrace``). If a generator's state has changed since, the line before has drawn.
    """

    def __init__(self, generators: Generators, report: Callable[[str], None]) -> None:
        """Prepares to watch one run of the forward.

        Args:
            generators: The random generators of Python's and NumPy's to watch.
            report: Called with ``file:line`` of each line that draws.
        """
        #: Returns the states of the generators now, and what it returned last.
        self._states, self._last_states = generators.states, generators.states()
        self._report = report
        #: The line that each watched frame has reached.
        self._lines: dict[FrameType, int] = {}
        self._in_node = False

    @contextmanager
    def allow_in_node(self) -> Iterator[Callable[[], bool]]:
        """Reports no lines while this context is open, in which a node runs.

        Yields:
            A function that returns, once the context is closed, whether the node has drawn random
            numbers.
        """
        self._report_if_drawn(user_location)
        self._in_node = True
        before = self._last_states
        try:
            yield lambda: self._last_states != before
        finally:
            self._in_node = False
            self._last_states = self._states()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the lines of this thread while this context is open."""
        before = sys.gettrace()
        sys.settrace(self._trace_frame)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace_frame(self, frame: FrameType, event: str, value: Any) -> _TraceFunction | None:
        """Makes Python trace the lines of a new frame if it is the user's; see ``sys.settrace``."""
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        is_watched = not self._in_node and is_users(frame) and module not in _DRAWING
        return self._trace_line if is_watched else None

    def _trace_line(self, frame: FrameType, event: str, value: Any) -> _TraceFunction:
        """Reports the last line if it has drawn; Python calls it before each line of a frame."""
        if not self._in_node:
            self._report_if_drawn(lambda: self._last_location(frame))
            self._lines[frame] = frame.f_lineno
        return self._trace_line

    def _last_location(self, frame: FrameType) -> str:
        """Returns ``file:line`` of the line that ran last in a frame, or else in its callers."""
        line = self._lines.get(frame)
        while line is None and frame.f_back is not None:
            frame = frame.f_back
            line = frame.f_lineno if frame in self._lines else None
        return f"{frame.f_code.co_filename}:{line}"

    def _report_if_drawn(self, location: Callable[[], str]) -> None:
        """Reports the line whose ``file:line`` ``location`` returns, if a generator has been used.

        A generator has been used if its state has changed since the last call.
        """
        states = self._states()
        if states != self._last_states:
            self._last_states = states
            self._report(location())
