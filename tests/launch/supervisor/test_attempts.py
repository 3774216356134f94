"""What follows an attempt, by the rules alone: no process, no clock, no Paddle."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from fleetpipe.job.attempt_files import INTERRUPTED, PREEMPTED, how_to_go_on
from fleetpipe.launch.supervisor.attempts import (
    POISONED,
    Attempt,
    End,
    Verdict,
    after,
    with_interrupt,
)

DONE = Verdict(0)
SAVED = Verdict(0, saved=8)


def disk_full(step: int, error: str = "[Errno 28] No space left on device") -> Verdict:
    text = "rank 0 raised: CheckpointError: step 4 cannot be saved"
    details = f"CheckpointError: ..\n  got: {error}"
    return Verdict(1, step=step, culprit=text, details=details, raised=True)


def killed(step: int | None, how: str = "") -> Verdict:
    return Verdict(137, step=step, culprit=f"rank 1 died{how}")


def raised(step: int | None, text: str) -> Verdict:
    return Verdict(1, step=step, culprit=f"rank 0 raised: {text}", raised=True)


def permanent(step: int | None) -> Verdict:
    return replace(raised(step, "ConfigError: x"), permanent=True)


def through(*verdicts: Verdict, max_restart: int = 3) -> tuple[int, int, list[str]]:
    """Returns with which code a job ends, after how many attempts, and what is said."""
    attempt, said = Attempt(), []
    for verdict in verdicts:
        then = after(attempt, verdict, max_restart)
        said += then.said
        if isinstance(then, End):
            return then.code, attempt.number, said
        attempt = then.attempt
    raise AssertionError(f"attempt {attempt.number} is to begin")


def test_what_the_terminal_has_is_not_said_again() -> None:
    error = "rank 0 raised: ValueError: bad\n  got: 3"
    verdict = Verdict(1, culprit=error, details="Traceback ..", raised=True)
    assert "got: 3\n    | Traceback .." in through(verdict, max_restart=0)[2][0]
    _, _, said = through(replace(verdict, shown=True), max_restart=0)
    assert said[0] == "attempt 1 ended: rank 0 raised: ValueError: bad"


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([DONE], 0),
        ([killed(4), raised(9, "x"), DONE], 0),
        ([killed(4), raised(9, "x"), killed(10), killed(11)], 137),
        ([killed(4), killed(4)], POISONED),
        ([killed(4), killed(5), raised(5, "x")], POISONED),
        ([disk_full(4), disk_full(4)], 1),
        ([raised(None, "x"), raised(None, "x")], 1),
        ([raised(None, "x"), raised(None, "y"), killed(None), killed(None)], 137),
        ([permanent(None)], 1),
        ([killed(4), permanent(5)], 1),
        ([SAVED], PREEMPTED),
    ],
)
def test_how_attempts_end_decides_how_many_there_are(ends: list[Verdict], code: int) -> None:
    assert through(*ends)[:2] == (code, len(ends))


def unsaved(name: str) -> tuple[str, ...]:
    said = f"asked to stop by {name}, the job saved nothing: "
    said += "a script saves first where it goes by fleetpipe.resume, within --grace"
    return "attempt 1 ended in step 4: rank 1 died", said


@pytest.mark.parametrize(
    ("verdict", "stopped_by", "code", "said"),
    [
        (DONE, signal.SIGTERM, 0, ()),
        (SAVED, signal.SIGTERM, PREEMPTED, (how_to_go_on(False, 8),)),
        (killed(4), signal.SIGUSR1, 138, unsaved("SIGUSR1")),
        (killed(4), signal.SIGTERM, 143, unsaved("SIGTERM")),
        (DONE, signal.SIGINT, 0, ()),
        (SAVED, signal.SIGINT, INTERRUPTED, (how_to_go_on(True, 8),)),
        (killed(4), signal.SIGINT, INTERRUPTED, ("interrupted",)),
    ],
)
def test_a_job_that_is_asked_to_stop_is_not_started_again(
    verdict: Verdict, stopped_by: int, code: int, said: tuple[str, ...]
) -> None:
    assert after(Attempt(), with_interrupt(verdict, stopped_by), 3, stopped_by) == End(code, said)


def test_what_ctrl_c_ended_was_interrupted() -> None:
    assert with_interrupt(DONE, signal.SIGINT) == DONE
    assert with_interrupt(killed(4), signal.SIGTERM) == killed(4)
    for verdict in (SAVED, killed(4)):
        expected = replace(verdict, code=INTERRUPTED, culprit="interrupted")
        assert with_interrupt(verdict, signal.SIGINT) == expected


def test_a_full_disk_is_not_the_fault_of_a_step() -> None:
    *_, said = through(disk_full(4), disk_full(4))
    assert "step 4 failed twice in a row" in said[-1]
    assert "what to do: free space on the disk" in said[-1]
    assert "data of this step" not in said[-1]
    limited = disk_full(4, "[Errno 27] File too large"), killed(4, " (was ended by SIGXFSZ)")
    for verdict in limited:
        code, _, said = through(verdict, verdict)
        assert code == verdict.code
        assert "what to do: raise the limit on the size of a file, which ulimit -f" in said[-1]


def test_an_error_that_no_restart_mends_is_said_once() -> None:
    *_, said = through(permanent(None))
    assert said == [
        "attempt 1 ended: rank 0 raised: ConfigError: x",
        "no restart mends this error: the job has failed",
    ]


def test_no_restart_is_one_attempt() -> None:
    assert through(killed(3), max_restart=0) == (
        137,
        1,
        ["attempt 1 ended in step 3: rank 1 died", "all 0 restarts are used: the job has failed"],
    )


@pytest.mark.parametrize(
    ("done", "words"),
    [(None, ""), (0, " (no step ran)"), (1, " after 1 step"), (3, " after 3 steps")],
)
def test_a_script_that_counts_no_steps_is_told_how_many_ran(done: int | None, words: str) -> None:
    failure = replace(raised(None, "x"), done=done)
    _, attempts, said = through(failure, failure)
    assert attempts == 2
    assert said[0] == f"attempt 1 ended{words}: rank 0 raised: x"
    assert f"twice in a row with the same error{words}: it is not started again" in said[-1]
