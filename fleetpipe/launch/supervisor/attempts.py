"""How an attempt ended, whether the job is started again, and with which code it ends where not.

The verdict says which rank failed first, in which step, and with which error. Nothing here
starts a process, looks at a clock or loads Paddle.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fleetpipe.job import attempt_files
from fleetpipe.job.watching.failure import Failure
from fleetpipe.job.watching.watch import EXIT_CODE
from fleetpipe.launch.script import in_a_shell

_MOST_LINES = 12


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended.

    Attributes:
        code: 0 where every rank did its work; else the code of the rank that failed first, as a
            shell has it.
        saved: Steps that were saved where the attempt was asked to end; else None.
        step: The step in which the first rank failed; None before the first.
        culprit: Who failed first, and how; empty where nobody did.
        details: What its last words were, or where all ranks were.
        raised: Whether it raised an error, as it would again.
        permanent: Whether no restart mends that error.
        shown: Whether the terminal has what it raised already.
        done: Steps that the pipeline did in the attempt; None where ``step`` says more.
    """

    code: int
    saved: int | None = None
    step: int | None = None
    culprit: str = ""
    details: str = ""
    raised: bool = False
    permanent: bool = False
    shown: bool = False
    done: int | None = None

    def repeats(self, other: Verdict) -> bool:
        """Whether this failure is the one of ``other`` once more.

        That is one in the same step; before any step, where a rank may have been killed while it
        loaded, one with the same kind of error from the same line.
        """
        if self.step is None or other.step is None:
            both = self.raised and other.raised
            return self.step is other.step and both and self._cause() == other._cause()
        return self.step == other.step

    @property
    def disk_full(self) -> bool:
        """Whether the disk had no room left: nothing is wrong with the step."""
        words = f"{self.culprit}\n{self.details}"
        return any(os.strerror(number) in words for number in (errno.ENOSPC, errno.EDQUOT))

    def _cause(self) -> tuple[str, list[str]]:
        """Returns the kind of the error, and the line of code that raised it.

        What it says may have a time in it, or an address, and any rank may be the first to say it.
        """
        _, _, error = self.culprit.partition(" raised: ")
        return error.partition(":")[0], re.findall(r'File "[^"]+", line \d+', self.details)[-1:]


def judge(home: Path, code: int, shown: int | None = None) -> Verdict:
    """Judges an attempt by what its ranks and its launcher left in its folder.

    Args:
        home: The folder.
        code: That of the launcher.
        shown: The rank whose output is on the terminal; None: none is.
    """
    saved = attempt_files.preempted_at(home)
    if code == 0 or saved is not None:
        return Verdict(code, saved)
    steps = attempt_files.steps_begun(home)
    rank, failed, failure = _first(home)
    step = None if rank is None else steps.get(rank, max(steps.values(), default=None))
    if rank is None:
        return Verdict(code, culprit=f"Paddle's launcher ended with {code}")
    done = attempt_files.steps_done(home) if step is None else None
    who, code = f"rank {rank}", in_a_shell(failed) or code
    if failure is None:
        return Verdict(code, None, step, f"{who} {_in_words(failed)} without a word", done=done)
    signalled = f" ({_in_words(failed)})" if failed < 0 else ""
    words = f"{who} {failure.what}{signalled}: {failure.text}"
    details = "\n".join(failure.details.rstrip().splitlines()[-_MOST_LINES:])
    raised = failure.what == "raised"
    return Verdict(
        code,
        None,
        step,
        words,
        details,
        raised,
        failure.permanent,
        shown=raised and rank == shown,
        done=done,
    )


def _first(home: Path) -> tuple[int | None, int, Failure | None]:
    """Returns the rank that failed first, its exit code, and what is told of it."""
    failures = [report.failure for report in attempt_files.failures(home)]
    ended = [
        (rank, attempt_files.code_of(home, rank) or code)
        for rank, code in attempt_files.ended_ranks(home)
    ]
    failed = [(rank, code) for rank, code in ended if code]
    culprits = [(rank, code) for rank, code in failed if code != EXIT_CODE] or failed
    # A process that is ended by a signal tells nobody; before it others do not fail.
    if culprits and culprits[0][1] < 0 and culprits[0] == failed[0]:
        rank = culprits[0][0]
    elif failures:
        rank = failures[0].rank
    elif culprits:
        rank = culprits[0][0]
    else:
        return None, 0, None
    report = [failure for failure in failures if failure.rank == rank]
    return rank, dict(ended).get(rank, 0), report[0] if report else None


def _in_words(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


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
) -> End | Again:
    """Decides what follows an attempt that has ended.

    Args:
        attempt: The attempt.
        verdict: How it ended, as :func:`interrupted` returns it.
        max_restart: How many failures are followed by another attempt.
        stopped_by: The first signal that asked the job to stop; None where none did.
    """
    saved = verdict.saved
    if verdict.code == attempt_files.INTERRUPTED and stopped_by == signal.SIGINT:
        what = "" if saved is None else f", the job saved {saved} steps"
        return End(attempt_files.INTERRUPTED, (f"interrupted{what}",))
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
        said = f"asked to stop by {signal.Signals(stopped_by).name}, the job saved nothing: "
        said += "a script saves first where it goes by fleetpipe.resume, within --grace"
        return End(in_a_shell(-stopped_by), (account, said))
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
