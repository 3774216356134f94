"""The first and the last moments of a job on real ranks: nothing hangs, and nothing stays open."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path

import paddle
import pytest

from tests.byhand import PROMPT, Ended, started
from tests.fixtures import Launch

pytestmark = pytest.mark.processes

WORKER = Path(__file__).with_name("start_worker.py")
LIMIT = 4.0


def trouble(folder: Path, number: str, *cases: tuple[str, int]) -> list[tuple[Ended, float]]:
    """Sends a signal to a rank of a job at a moment, one job for each (moment, rank).

    Returns:
        The end of the other rank of each job, and how long after the signal it came.
    """
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                started(
                    WORKER,
                    2,
                    *(moment, number, str(rank)),
                    folder=folder,
                    env={"START_TIMEOUT": str(LIMIT)},
                )
            )
            for moment, rank in cases
        ]
        ends = []
        for (_, rank), job in zip(cases, jobs):
            since = job.wait_for(f"troubled.{rank}")
            (ended,) = job.wait([1 - rank]).values()
            job.signal(rank, signal.SIGKILL)
            ends.append((ended, ended.at - since))
    return ends


@pytest.mark.once
@pytest.mark.parametrize(
    "cases",
    [
        [("connecting", 1), ("opening Paddle's store", 0), ("opening Paddle's store", 1)],
        [("within a group", 0), ("within the first sum", 1), ("ending", 0)],
    ],
)
def test_a_stopped_rank_is_named_in_time(cases: list[tuple[str, int]], tmp_path: Path) -> None:
    for (moment, rank), (ended, seconds) in zip(cases, trouble(tmp_path, "SIGSTOP", *cases)):
        assert ended.code > 0, moment
        assert 3 < seconds < LIMIT + PROMPT, moment
        named = rf"PipelineTimeout: .*(for|to) rank(\(s\))? {rank}\b"
        assert re.search(named, ended.log), ended.log
        assert "RuntimeError" not in ended.log


def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    cases = [("opening Paddle's store", 0), ("within a group", 1), ("within the first sum", 0)]
    for (moment, rank), (ended, seconds) in zip(cases, trouble(tmp_path, "SIGKILL", *cases)):
        assert ended.code > 0, moment
        assert seconds < PROMPT, moment
        *_, last = re.findall(r"^(?:fleetpipe\.errors\.)?(\w+: .*)", ended.log, re.MULTILINE)
        assert re.search(rf"^PeerFailed: rank {rank} died: .*Paddle's group", last), ended.log


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="this Paddle begins by NCCL alone")
def test_paddles_older_start_before_a_job_is_named(launch: Launch) -> None:
    script = """
        import os, paddle
        del os.environ["PADDLE_DISTRI_BACKEND"]
        paddle.distributed.init_parallel_env()
        from fleetpipe import fleet
        fleet.init(is_collective=True)
        """
    for log in launch(script, 2, check=False).logs:
        assert "StateError: Paddle began without the groups of ranks that a job needs" in log


def test_jobs_that_begin_and_end_leave_nothing_open(tmp_path: Path) -> None:
    with started(WORKER, 2, "cycles", folder=tmp_path) as job:
        ranks = job.wait()
    for ended in ranks.values():
        assert ended.code == 0, ended.log
        cycles = re.findall(r"^### \d+: (.*); (\d+) objects; (.*)$", ended.log, re.MULTILINE)
        assert len(cycles) == 10
        opened, objects, losses = zip(*cycles[1:])
        # A thread or a socket may be seen on its way out; six cycles that leaked would add up.
        counts = [[int(number) for number in re.findall(r"\d+", text)] for text in opened]
        assert all(min(column[-3:]) - min(column[:3]) <= 2 for column in zip(*counts)), opened
        # The interpreter's own caches fill up; each of the eight jobs holds far more than ten.
        assert int(objects[-1]) - int(objects[0]) < 100
        assert len(set(losses)) == 1
