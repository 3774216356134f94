"""The schedule under which stages are measured, and the clock."""

from __future__ import annotations

import os
import time

from fleetpipe.dygraph.observe.measuring import clock_for, in_turn
from fleetpipe.schedules import Placement, build
from tests.fixtures import Patch
from tests.pipelines import job


def test_forward_and_backward_are_measured_in_turn_on_any_placement() -> None:
    for placement in (Placement("loop", 3, 1), Placement("loop", 2, 3), Placement("vee", 2, 2)):
        for kinds in ("B", "IW"):
            schedule = in_turn(placement, 5, kinds)
            schedule.verify()
            assert sum(map(len, schedule.actions)) == 5 * placement.stages * (1 + len(kinds))
    plain = build("1F1B", ranks=3, micro_batches=5)
    assert in_turn(plain.placement, 5, "B").actions == plain.actions


def test_slices_run_in_turn_as_under_seq1f1b() -> None:
    for placement in (Placement("loop", 2, 2), Placement("vee", 2, 2)):
        schedule = in_turn(placement, 3, "B", slices=4)
        schedule.verify()
        assert sum(map(len, schedule.actions)) == 3 * 4 * placement.stages * 2
    plain = build("Seq1F1B", ranks=3, micro_batches=5, slices=2)
    assert in_turn(plain.placement, 5, "B", slices=2).actions == plain.actions


def test_ranks_that_share_processors_are_measured_in_processor_time(
    monkeypatch: Patch,
) -> None:
    with job(2) as running:
        assert clock_for(running) is time.perf_counter
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: ())
        assert clock_for(running) is time.thread_time
