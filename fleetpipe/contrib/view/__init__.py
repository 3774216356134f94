"""Shows a run: ``fleetpipe watch``, ``fleetpipe report`` and ``fleetpipe why``.

``reading`` reads what a run leaves: its board (``board.py``) and history, the files of its folder
(``run_folder.py``), a trace (``traced_ops.py``). ``judging`` has the questions that somebody asks
of a run and their answers (``answers.py``), finds slow ranks while it runs (``slow_ranks.py``) and
stragglers in a trace (``slowdown.py``; the definitions are those of the what-if analysis of
arXiv:2505.05713). ``showing`` has the pages, live or saved, the server, and the metrics for
Prometheus. ``reporting.py`` runs on the first rank of a job and writes the board. No Paddle is
needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetpipe.extras import late

if TYPE_CHECKING:
    from fleetpipe.contrib.view.judging.slowdown import Slowdown as Slowdown
    from fleetpipe.contrib.view.judging.slowdown import slowdown_of as slowdown_of
    from fleetpipe.contrib.view.judging.trace_replay import ReplayedStep as ReplayedStep
    from fleetpipe.contrib.view.judging.trace_replay import steps_of as steps_of
    from fleetpipe.contrib.view.reading.traced_ops import TracedOperation as TracedOperation
    from fleetpipe.contrib.view.reading.traced_ops import read_columns as read_columns
    from fleetpipe.contrib.view.reading.traced_ops import read_trace as read_trace

__all__ = [
    "ReplayedStep",
    "Slowdown",
    "TracedOperation",
    "read_columns",
    "read_trace",
    "slowdown_of",
    "steps_of",
]

_JUDGING, _READING = f"{__name__}.judging", f"{__name__}.reading"

if not TYPE_CHECKING:  # to a type checker it would give the module every name
    __getattr__ = late(
        {
            "ReplayedStep": f"{_JUDGING}.trace_replay",
            "Slowdown": f"{_JUDGING}.slowdown",
            "TracedOperation": f"{_READING}.traced_ops",
            "read_columns": f"{_READING}.traced_ops",
            "read_trace": f"{_READING}.traced_ops",
            "slowdown_of": f"{_JUDGING}.slowdown",
            "steps_of": f"{_JUDGING}.trace_replay",
        }
    )
