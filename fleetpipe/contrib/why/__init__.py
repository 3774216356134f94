"""Finds out why a run was slow: replays its trace and computes the time without stragglers.

Begin with ``traced_ops.py``, which reads a trace; ``trace_replay.py`` computes when each operation
ends, given durations; ``slowdown.py`` replays it with ideal durations, or under another schedule,
and finds the stragglers; ``why_command.py`` draws the result. The definitions are those of the
what-if analysis of arXiv:2505.05713. Imports no Paddle.
"""

from __future__ import annotations

from fleetpipe.contrib.why.slowdown import Slowdown, slowdown_of
from fleetpipe.contrib.why.trace_replay import ReplayedStep, steps_of
from fleetpipe.contrib.why.traced_ops import TracedOperation, read_columns, read_trace

__all__ = [
    "TracedOperation",
    "Slowdown",
    "ReplayedStep",
    "read_columns",
    "read_trace",
    "slowdown_of",
    "steps_of",
]
