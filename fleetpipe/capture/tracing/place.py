"""Finds the file and line in the user's code where something happens."""

from __future__ import annotations

import dis
import inspect
import traceback
from functools import cache
from types import CodeType, FrameType, TracebackType

from fleetpipe.aliases import Layer

#: Packages whose frames are not the user's; the last wraps functions of Paddle 2.6.2.
_NOT_THE_USERS = ("paddle", "fleetpipe", "numpy", "decorator")
#: Functions of Paddle that read whether indices or lengths are within bounds, and nothing else.
_CHECKING = {"take_along_axis", "masked_scatter"}
#: Models that Paddle brings are like a user's.
_MODELS = "paddle.vision.models."


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
    """Whether Paddle's function reads numbers only to refuse some of them."""
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
    """Whether what a jump at this offset passes over ends with ``raise``."""
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
