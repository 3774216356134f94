"""A campaign of failures on 2 and 3 real ranks: nothing hangs, and every message is right.

The ranks run trouble.py. Most are started by hand, so that each one's exit code and the moment of
its end are seen without a launcher's help; `tests.byhand` fails where a process is left behind.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import paddle
import pytest

from tests.byhand import PROMPT, Ended, Ranks, started
from tests.fixtures import Launch

pytestmark = pytest.mark.processes

TROUBLE = Path(__file__).with_name("trouble.py")


def run(
    case: str, ranks: int, folder: Path, timeout: float = 60
) -> tuple[dict[int, Ended], Callable[[str], float]]:
    """Runs a case to its end; returns that of each rank, and a look-up of the moments it noted."""
    with begin(case, ranks, folder, timeout) as job:
        return job.wait(), job.moment


def begin(
    case: str, ranks: int, folder: Path, timeout: float = 60, **options: Any
) -> AbstractContextManager[Ranks]:
    """Starts a case, under a limit of ``timeout`` seconds for each wait."""
    env = {"TROUBLE_TIMEOUT": str(timeout)}
    return started(TROUBLE, ranks, case, folder=folder, env=env, **options)


def the_line(kind: str, log: str) -> str:
    """The one line of a log that names an error of this kind."""
    lines = [line for line in log.splitlines() if re.search(rf"\b{kind}:", line)]
    assert len(lines) == 1, log
    return lines[0].split(kind, 1)[1]


@pytest.fixture(scope="module", autouse=True)
def slow_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two replicas of which one sleeps for 35 s; it sleeps while the other tests run."""
    with begin("slow_replica", 2, tmp_path_factory.mktemp("slow")) as job:
        yield job
        for rank in range(2):  # where its own test was not selected, or failed
            job.signal(rank, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def stopped_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks over Paddle's groups of which one is stopped, while the other tests run."""
    with begin("stopped_over_groups", 2, tmp_path_factory.mktemp("stopped"), timeout=100) as job:
        yield job
        for rank in range(2):  # where its own test was not selected, or failed
            job.signal(rank, signal.SIGKILL)


# A rank that dies


def test_the_others_leave_at_a_death(tmp_path: Path) -> None:
    ranks, moment = run("killed_while_one_computes", 3, tmp_path)
    assert ranks[1].code == -signal.SIGKILL
    for rank in (0, 2):
        assert ranks[rank].code > 0
        assert the_line("PeerFailed", ranks[rank].log).startswith(": rank 1 died")
        assert ranks[rank].at - moment("died.1") < PROMPT
    # Rank 0 was in one long product, and never came back from it.
    assert moment("computing.0") < moment("died.1")
    with pytest.raises(FileNotFoundError):
        moment("computed.0")
    assert "where: rank 0: operation F0.1 (stage 0, micro-batch 1)" in ranks[0].log
    assert "operation F1.0 (stage 1, micro-batch 0)" in the_line("PeerFailed", ranks[2].log)
    assert "Traceback" not in ranks[0].log


def test_a_rank_that_waits_inside_gloo_leaves_too(tmp_path: Path) -> None:
    ranks, moment = run("killed_inside_gloo", 2, tmp_path)
    assert ranks[0].code > 0
    line = the_line("PeerFailed", ranks[0].log)
    assert line.startswith(": rank 1 died")
    assert "replica 1, rank 0, operation REDUCE" in line
    assert ranks[0].at - moment("died.1") < PROMPT


def test_under_the_launcher_nobody_waits(launcher: Launch, tmp_path: Path) -> None:
    job = launcher(TROUBLE, 2, args=["killed_while_waiting"], cwd=tmp_path, check=False)
    assert job.returncode != 0
    assert the_line("PeerFailed", job.logs[0]).startswith(": rank 1 died")
    # The launcher's own signal, 4 s after the death, ends what is still there without a word.
    assert (tmp_path / "told.0").exists()


# A rank that hangs


def test_a_stopped_rank_makes_the_others_time_out(tmp_path: Path) -> None:
    with begin("stopped", 3, tmp_path, timeout=4) as job:
        since = job.wait_for("stopped.1")
        ranks = job.wait([0, 2])
        job.signal(1, signal.SIGCONT)
        ranks.update(job.wait([1]))
    for rank in (0, 2):
        assert ranks[rank].code > 0
        assert 3 < ranks[rank].at - since < 4 + PROMPT
        log = ranks[rank].log
        assert "PipelineTimeout: rank" in log
        assert re.search(r"rank 1 is silent for \d\.\d s: stopped, or its host", log)
        assert "it was at: operation F1.0 (stage 1, micro-batch 0)" in log
        assert "(most recent call first)" in log
        assert 'transport/sockets.py", line' in log
    text = "".join(ranks[rank].log for rank in (0, 2))
    # Whoever waited longest says for whom; the other repeats it and adds where it is itself.
    assert "waited 4 s for a message of rank 1" in text
    assert "last finished F0." in text
    assert ranks[1].code > 0
    assert "PipelineTimeout" in ranks[1].log


def test_a_rank_that_is_stopped_inside_gloo_is_named(
    tmp_path: Path,
) -> None:
    with begin("stopped_inside_gloo", 2, tmp_path, timeout=4) as job:
        since = job.wait_for("stopped.1")
        (left,) = job.wait([0]).values()
        job.signal(1, signal.SIGKILL)
    assert left.code > 0
    assert 3 < left.at - since < 4 + PROMPT
    line = the_line("PipelineTimeout", left.log)
    assert "rank 0 waited 4 s for rank 1: within a collective operation of ranks [0, 1]" in line


def test_a_layer_in_a_deadlock_ends_with_its_stacks(tmp_path: Path) -> None:
    ranks, moment = run("deadlocked", 2, tmp_path, timeout=3)
    assert ranks[0].code > 0
    assert ranks[1].code > 0
    assert "rank 0 waited 3 s for a message of rank 1" in ranks[0].log
    assert "rank 1 is at: operation F1.0 (stage 1, micro-batch 0)" in ranks[0].log
    assert the_line("PipelineTimeout", ranks[1].log).startswith(": rank 0 timed out")
    assert "in deadlock" in ranks[1].log
    assert all(ended.at - moment("stopped.1") < 3 + PROMPT for ended in ranks.values())


@pytest.mark.once
def test_a_rank_that_stops_and_goes_on_changes_no_bit(tmp_path: Path) -> None:
    with begin("stopped_and_continued", 2, tmp_path) as job:
        job.wait_for("stopped.1")
        time.sleep(3)
        job.signal(1, signal.SIGCONT)
        ranks = job.wait()
        assert [ended.code for ended in ranks.values()] == [0, 0], ranks
        assert job.moment("same.0") > job.moment("stopped.1") + 3


@pytest.mark.once
def test_a_job_that_is_suspended_as_a_whole_accuses_nobody(tmp_path: Path) -> None:
    """For longer than its limit; and one rank goes on a good while before the other."""
    with begin("suspended", 2, tmp_path, timeout=6) as job:
        for rank in range(2):
            job.wait_for(f"begun.{rank}")
        job.signal(1, signal.SIGSTOP)
        time.sleep(1)  # until rank 0 waits for rank 1
        job.signal(0, signal.SIGSTOP)
        time.sleep(6.5)
        job.signal(0, signal.SIGCONT)
        time.sleep(1)
        job.signal(1, signal.SIGCONT)
        (job.home / "enough").touch()
        ranks = job.wait()
    assert [ended.code for ended in ranks.values()] == [0, 0], ranks


# A rank that raises


def sections(log: str) -> dict[str, str]:
    """What a rank wrote in each of the jobs that it began one after another."""
    parts = log.split("### ")[1:]
    return {part.splitlines()[0]: part for part in parts}


def test_an_error_on_any_rank_is_told_on_all(tmp_path: Path) -> None:
    count = 3
    ranks, _ = run("raises_everywhere", count, tmp_path)
    told = {rank: sections(ended.log) for rank, ended in ranks.items()}
    for origin in range(count):
        for which in ("forward", "backward"):
            for rank in range(count):
                text = told[rank][f"{which} of rank {origin}"]
                if rank == origin:
                    assert "ValueError: boom in a layer" in text
                    assert f"raised at rank {origin}, operation" in text
                    continue
                # Paddle makes of a backward's error one of its own, and drops the frames below.
                line = the_line("PeerFailed", text)
                assert re.match(rf": rank {origin} raised: .*ValueError: boom in a layer", line)
                assert text.count("Traceback (most recent call last)") == 1
                assert text.count("in boom") == (which == "forward")
    for rank in range(count):
        text = told[rank]["a cut that fits on all ranks but one"]
        assert "PartitionError" in text
        assert ("PeerFailed: rank 1 raised" in text) == (rank != 1)
        assert "trained at last" in told[rank]["nothing"]
        assert ranks[rank].code == 0


@pytest.mark.parametrize(
    ("case", "what", "place"),
    [
        ("error_between_steps", "raised: KeyError: 'no such sample'", "in careless"),
        ("exit_between_steps", "raised: SystemExit: 3", "in exit_between_steps"),
        ("script_ends_early", "left: its process ended before its work was done", ""),
    ],
)
def test_the_other_rank_says_why_it_ends(case: str, what: str, place: str, tmp_path: Path) -> None:
    ranks, _ = run(case, 2, tmp_path)
    assert ranks[0].code > 0
    assert the_line("PeerFailed", ranks[0].log) == f": rank 1 {what}"
    assert place in ranks[0].log
    assert ranks[1].code == {"exit_between_steps": 3, "script_ends_early": 0}.get(case, 1)
    assert "PeerFailed" not in ranks[1].log


# Ranks that do not belong together


def test_ranks_that_differ_are_refused_on_all_with_both_sides(tmp_path: Path) -> None:
    ranks, _ = run("configured_differently", 3, tmp_path)
    expected = {
        "accumulate_steps": ("micro_batches = 4", "micro_batches = 2"),
        "schedule": ("schedule = '1F1B'", "schedule = 'FThenB'"),
        "widths": ("layer 0 = ", "9"),
        "degrees": ("pp = 3", "pp = 1"),
        "threads": ("OMP_NUM_THREADS = 1", "OMP_NUM_THREADS = 2"),
    }
    for ended in ranks.values():
        for what, text in sections(ended.log).items():
            assert "ConfigError: ranks 0 and 1 of the job do not run the same" in text
            first, other = re.findall(r"^  (?:expected|got): (.*)$", text, re.MULTILINE)
            assert first.startswith("as on rank 0: ")
            assert other.startswith("on rank 1: ")
            assert expected[what][0] in first
            assert expected[what][1] in other
        assert sections(ended.log).keys() == expected.keys()
        assert ended.code == 0


def test_a_rank_that_computes_longer_than_gloo_waits_goes_on(slow_job: Ranks) -> None:
    ranks = slow_job.wait(limit=90)
    assert [ended.code for ended in ranks.values()] == [0, 0], ranks
    assert slow_job.moment("done.0") > 0


@pytest.mark.skipif(paddle.version.major == "2", reason="2.6.2 has no such transport on CPUs")
def test_a_rank_that_is_stopped_longer_than_gloo_waits_goes_on(stopped_job: Ranks) -> None:
    since = stopped_job.wait_for("stopped.1")
    time.sleep(max(0.0, since + 36 - time.monotonic()))
    stopped_job.signal(1, signal.SIGCONT)
    ranks = stopped_job.wait(limit=60)
    assert [ended.code for ended in ranks.values()] == [0, 0], ranks
    losses = [(stopped_job.home / f"losses.{rank}").read_text() for rank in range(2)]
    assert losses[0] == losses[1]
    assert stopped_job.moment("done.0") - since > 30
