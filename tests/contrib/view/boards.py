"""Boards and records of imagined jobs."""

from __future__ import annotations

import time
from dataclasses import replace

from fleetpipe.contrib.view.judging.slow_ranks import SlowRank
from fleetpipe.contrib.view.reading.board import JobBoard, LastCheckpoint
from fleetpipe.job.records import RankRecord


def board(**fields: object) -> JobBoard:
    """A job of two ranks of which one is slow and one stopped."""
    running = RankRecord(
        0,
        "operation F0.1",
        (0,),
        step=12,
        step_age=0.25,
        busy=0.75,
        memory=3_000_000,
        incoming=2,
        outgoing=64,
        state="running",
    )
    stopped = RankRecord(
        1,
        'B1.0 "<last>"',
        (1,),
        step=11,
        step_age=4.0,
        busy=0.5,
        memory=5_000_000,
        state="stopped",
    )
    made = JobBoard(
        at=time.time(),
        step=11,
        steps=100,
        step_time=0.5,
        samples_per_second=64.0,
        ranks=(running, stopped),
        slow=(SlowRank(0, "compute", 1.5, "in the steps before"),),
        restarts=2,
        last_checkpoint=LastCheckpoint(10, 3.5),
        news="attempt 3, since rank 1 was ended by SIGKILL",
    )
    return replace(made, **fields)  # type: ignore[arg-type]
