"""Says what is the matter where a forward or a loss differentiates by a tensor of another stage.

A loss of physics takes the model's output and differentiates it by the model's input: what lies
between the two is in the graphs of several stages.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.nest import outline
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle


def is_refusal(error: Exception) -> bool:
    """Whether ``paddle.grad`` raised it: a forward, or a loss, differentiates by a tensor."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = Path(paddle.__file__).parent
    return any(
        code.co_name == "grad" and inside in Path(code.co_filename).parents for code in codes
    )


def refusal(error: Exception, where: str, value: Nest) -> BoundaryError:
    """Returns what to raise in the place of an error of ``paddle.grad``."""
    return BoundaryError(
        f"{where} differentiates by a tensor from which nothing leads to the result in this stage",
        where=_line_of(error),
        expected="all that lies between the two in one stage: a stage has a graph of its own",
        got=outline(value),
        cause="the tensor came with the value, and what was computed of it in stages before is "
        "not in this one's graph; or it has stop_gradient=True",
        fix="put the layers between the two into one layer of the list (of a plain model: into one "
        "sublayer) whose forward calls paddle.grad(.., create_graph=True) and returns it too",
    )


def _line_of(error: Exception) -> str | None:
    """Returns file and line of the innermost frame that is neither Paddle's nor of this package."""
    # The last wraps functions of Paddle 2.6.2.
    foreign = ("paddle", "fleetpipe", "decorator")
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in foreign
    ]
    return lines[-1] if lines else None
