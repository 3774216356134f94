"""Lines of the user's script in the stacks that Paddle notes for operations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from fleetpipe.paddle_api import paddle

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_FOREIGN = (os.path.dirname(paddle.__file__), _PACKAGE, os.path.dirname(_PACKAGE) + "/fleetpipe/")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_IMPORTLIB = "<frozen "


def user_line(stack: Iterable[str]) -> str:
    """Returns the innermost frame of a stack that is neither Paddle's nor fleetpipe's."""
    line = ""
    for frame in stack:
        match = _FRAME.search(frame)
        if match and not match[1].startswith((*_FOREIGN, _IMPORTLIB)):
            line = f"{match[1]}, line {match[2]}"
    return line
