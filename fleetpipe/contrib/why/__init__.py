"""Why a run was slow: replays a trace, and says how fast its steps were if nothing straggled.

Begin with ``operations.py``, what a trace holds; ``replay.py`` says when each operation ends, given
times; ``slowdown.py`` asks for that with some operations made ideal, or under another schedule, and
finds out what straggled; ``command.py`` draws it. The definitions are those of the what-if analysis
of arXiv:2505.05713. Imports no Paddle.
"""

from __future__ import annotations

from fleetpipe.contrib.why.operations import TracedOperation, read_columns, read_trace
from fleetpipe.contrib.why.replay import ReplayedStep, steps_of
from fleetpipe.contrib.why.slowdown import Slowdown, slowdown_of

__all__ = [
    "TracedOperation",
    "Slowdown",
    "ReplayedStep",
    "read_columns",
    "read_trace",
    "slowdown_of",
    "steps_of",
]
