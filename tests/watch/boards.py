"""Boards and records of imagined jobs."""

from __future__ import annotations

import time
from dataclasses import replace

from fleetpipe.watch.board import JobBoard, LastCheckpoint, RankState
from fleetpipe.watch.slow_ranks import SlowRank


def board(**fields: object) -> JobBoard:
    """A job of two ranks of which one is slow and one stopped."""
    running = RankState(0, 0, "running", 0.75, 3_000_000, 0.25, 12, "operation F0.1", 2, 64)
    stopped = RankState(1, 1, "stopped", 0.5, 5_000_000, 4.0, 11, 'B1.0 "<last>"')
    made = JobBoard(
        at=time.time(),
        step=11,
        steps=100,
        step_time=0.5,
        samples_per_second=64.0,
        ranks=(running, stopped),
        slow=(SlowRank(0, "compute", 1.5),),
        restarts=2,
        last_checkpoint=LastCheckpoint(10, 3.5),
        news="attempt 3, since rank 1 was ended by SIGKILL",
    )
    return replace(made, **fields)  # type: ignore[arg-type]
