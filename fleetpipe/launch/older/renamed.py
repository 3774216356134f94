"""What names and arguments of older Paddle are called today, for errors to say so."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

#: Where Paddle has what ``paddle.fluid`` had, in the order in which a name is looked for.
_HOMES = (
    "paddle",
    "paddle.static",
    "paddle.static.nn",
    "paddle.nn",
    "paddle.nn.functional",
    "paddle.nn.initializer",
    "paddle.optimizer",
    "paddle.optimizer.lr",
    "paddle.regularizer",
    "paddle.metric",
    "paddle.io",
    "paddle.utils",
    "paddle.base",
)
#: Names that are others today, and parts of names that are left out.
_NAMES = {
    "elementwise_sub": "subtract",
    "elementwise_mul": "multiply",
    "elementwise_div": "divide",
    "fill_constant": "full",
    "guard": "disable_static",
}
_LEFT_OUT = re.compile(r"^(elementwise|reduce)_|(Optimizer|Initializer)$")
#: Arguments that are others today; the first that a function has is meant.
_ARGUMENTS = {
    "act": ("activation",),
    "dim": ("axis",),
    "dropout_prob": ("p",),
    "filter_size": ("kernel_size",),
    "input": ("x",),
    "input_dim": ("in_features",),
    "is_sparse": ("sparse",),
    "keep_dim": ("keepdim",),
    "num_channels": ("in_channels", "num_features"),
    "num_filters": ("out_channels",),
    "output_dim": ("out_features",),
    "param_attr": ("weight_attr",),
    "parameter_list": ("parameters",),
    "pool_padding": ("padding",),
    "pool_size": ("kernel_size",),
    "pool_stride": ("stride",),
    "regularization": ("weight_decay",),
}
_UNEXPECTED = re.compile(r"(\w+?)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")


def name_today(old: str) -> str | None:
    """Returns the dotted name that Paddle has in the place of an older one; None where it has none.

    Args:
        old: The older name; only its last part counts.
    """
    last = old.rpartition(".")[2]
    for name in (_NAMES.get(last, last), _LEFT_OUT.sub("", last)):
        for home, _ in _found(name):
            return f"{home}.{name}"
    return None


def argument_today(error: BaseException) -> str | None:
    """Returns a line for an error about an argument that a function of Paddle's does not have.

    Args:
        error: What nobody caught.

    Returns:
        The line, which names the argument of today or all that there are; None for another error,
        and where the function is not Paddle's.
    """
    if not isinstance(error, TypeError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name, given = _refused(str(error), frames)
    if not frames or _is_the_callers_own(name, frames[-1]):
        return None
    for home, called in _found(name):
        try:
            known = [one for one in inspect.signature(called).parameters if one != "name"]
        except (TypeError, ValueError):  # of C++
            continue
        for old in given:
            if old not in known:
                for today in _ARGUMENTS.get(old, ()):
                    if today in known:
                        return f"{old!r} of older Paddle is {today!r} today, in {home}.{name}"
                return f"{home}.{name} takes {', '.join(known)}"
    return None


def _refused(text: str, frames: Sequence[FrameType]) -> tuple[str, Collection[str]]:
    """Returns the name of the function that refused a call, and arguments of that call."""
    found = _UNEXPECTED.search(text)
    if found:
        return found[1], found[2].split()
    # Paddle 2.6.2 wraps functions by the package `decorator`, whose message has no name.
    for frame in frames:
        if {"func", "kw"} <= frame.f_locals.keys():
            return frame.f_locals["func"].__name__, frame.f_locals["kw"]
    return "", ()


@contextmanager
def told() -> Iterator[None]:
    """Within it, an error that nobody catches is shown with the line of :func:`argument_today`."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        link: BaseException | None = error
        while link is not None:
            line = argument_today(link)
            if line is not None:
                link.args = (f"{link}\n  {line}",)
            link = link.__cause__ or link.__context__
        before(kind, error, trace)

    before, sys.excepthook = sys.excepthook, show
    try:
        yield
    finally:
        sys.excepthook = before


def _found(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields what has a name, with the module that has it."""
    for home in _HOMES:
        value = getattr(importlib.import_module(home), name, None)
        if value is not None:
            yield home, value


def _is_the_callers_own(name: str, frame: FrameType) -> bool:
    """Tells whether the code that made a call has something of this name itself."""
    value = {**frame.f_globals, **frame.f_locals}.get(name)
    return value is not None and not str(getattr(value, "__module__", "")).startswith("paddle")
