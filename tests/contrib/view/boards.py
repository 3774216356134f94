"""Boards and records of imagined jobs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fleetpipe import atomic_file
from fleetpipe.contrib.view.judging.slow_ranks import SlowRank
from fleetpipe.contrib.view.reading.board import FILE, JobBoard, LastCheckpoint
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


def running(**fields: object) -> JobBoard:
    """A job of which both ranks run."""
    ranks = tuple(replace(rank, state="running", step_age=0.25) for rank in board().ranks)
    return replace(board(ranks=ranks), **fields)  # type: ignore[arg-type]


@contextmanager
def written_on(folder: Path, made: JobBoard, ahead: float = 0.0) -> Iterator[None]:
    """Writes a board into a folder again and again, by a clock that is ahead by some seconds."""
    over = threading.Event()

    def write() -> None:
        at = replace(made, at=time.time() + ahead)
        atomic_file.replace_text(folder / FILE, json.dumps(at.content()))

    def write_on() -> None:
        while not over.wait(0.1):
            write()

    write()
    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
