"""Whether a job is started again after an attempt, and with which code it ends where it is not.

Rules alone, for the launcher of one host and for the one on a Ray cluster: nothing here starts a
process, looks at a clock or loads Paddle.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import NamedTuple

from fleetpipe.job import attempt_files
from fleetpipe.launch.script import in_a_shell
from fleetpipe.launch.supervisor.verdict import Verdict

#: Status of a job of which one step failed twice in a row: EX_DATAERR.
POISONED = 65


class Attempt(NamedTuple):
    """An attempt, and what came before it.

    Attributes:
        number: From 1 on.
        restarts: How many attempts before it failed.
        failed: How the one before it failed; None where it did not.
    """

    number: int = 1
    restarts: int = 0
    failed: Verdict | None = None


class End(NamedTuple):
    """The job ends.

    Attributes:
        code: With this exit code.
        said: What the user is told.
    """

    code: int
    said: tuple[str, ...] = ()


class Again(NamedTuple):
    """The job is started again.

    Attributes:
        attempt: The one that begins.
        said: What the user is told.
    """

    attempt: Attempt
    said: tuple[str, ...]


def interrupted(verdict: Verdict, stopped_by: int | None) -> Verdict:
    """Returns the verdict on an attempt that Ctrl-C ended, whatever its ranks have left.

    Args:
        verdict: What they have left says.
        stopped_by: The first signal that asked the job to stop; None where none did.
    """
    if stopped_by != signal.SIGINT or verdict == Verdict(0):
        return verdict
    return replace(verdict, code=attempt_files.INTERRUPTED, culprit="interrupted", details="")


def after(
    attempt: Attempt,
    verdict: Verdict,
    max_restart: int,
    stopped_by: int | None = None,
    resized: str | None = None,
) -> End | Again:
    """Decides what follows an attempt that has ended.

    Args:
        attempt: The attempt.
        verdict: How it ended, as :func:`interrupted` returns it.
        max_restart: How many failures are followed by another attempt.
        stopped_by: The first signal that asked the job to stop; None where none did.
        resized: Why its ranks were asked to save and end although the job goes on, on others say;
            None where they were not. This is no failure.
    """
    saved = verdict.saved
    if verdict.code == attempt_files.INTERRUPTED and stopped_by == signal.SIGINT:
        what = "" if saved is None else f", the job saved {saved} steps"
        return End(attempt_files.INTERRUPTED, (f"interrupted{what}",))
    if saved is not None and resized is not None and stopped_by is None:
        following = Attempt(attempt.number + 1, attempt.restarts)
        return Again(following, (f"{saved} steps are saved: {resized}",))
    if saved is not None:
        said = f"asked to stop, the job saved {saved} steps and ended"
        return End(attempt_files.PREEMPTED, (said,))
    if verdict.code == 0:
        return End(0)
    return _after_failure(attempt, verdict, max_restart, stopped_by)


def _after_failure(
    attempt: Attempt, verdict: Verdict, max_restart: int, stopped_by: int | None
) -> End | Again:
    account = _account(attempt.number, verdict)
    if stopped_by is not None:
        return End(in_a_shell(-stopped_by), (account,))
    if verdict.permanent:
        return End(verdict.code, (account, "no restart mends this error: the job has failed"))
    if attempt.failed is not None and verdict.repeats(attempt.failed):
        poisoned = verdict.step is not None and not verdict.disk_full
        return End(POISONED if poisoned else verdict.code, (account, _poison(verdict)))
    if attempt.restarts == max_restart:
        why = f"all {max_restart} restarts are used: the job has failed"
        return End(verdict.code, (account, why))
    following = Attempt(attempt.number + 1, attempt.restarts + 1, verdict)
    begins = f"attempt {following.number} begins: restart {following.restarts} of {max_restart}"
    return Again(following, (account, begins))


def _account(number: int, verdict: Verdict) -> str:
    """Says how an attempt failed."""
    when = _progress(verdict) if verdict.step is None else f" in step {verdict.step}"
    said, *more = f"attempt {number} ended{when}: {verdict.culprit}".splitlines()
    if verdict.shown:
        return said
    return "\n".join([said, *more, *(f"    | {line}" for line in verdict.details.splitlines())])


def _progress(verdict: Verdict) -> str:
    """Says how many steps ran in an attempt whose script does not say in which step it is."""
    if verdict.done is None:
        return ""
    steps = "1 step" if verdict.done == 1 else f"{verdict.done} steps"
    return f" after {steps}" if verdict.done else " (no step ran)"


def _poison(verdict: Verdict) -> str:
    """Says why a job is not started again that failed twice alike."""
    what = f"the job failed twice in a row with the same error{_progress(verdict)}"
    if verdict.step is not None:
        what = f"step {verdict.step} failed twice in a row"
    to_do = "look at the data of this step and at the error above"
    if verdict.disk_full:
        to_do = "free space on the disk that the error above names, which is full"
    return (
        f"{what}: it is not started again\n"
        f"  what to do: {to_do}; a job that is started anew goes on from its checkpoint"
    )
