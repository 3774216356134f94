"""Judges how an attempt ended, and decides whether the job restarts, on how many ranks, or ends.

Start with :func:`judge`, which returns a ``Verdict``: which rank failed first, in which step, and
with which error; then :func:`decide_next`. A position is the place of a rank on the host, numbered
from 0, such as the card that it gets. A position is given up when its rank has failed twice without
a step in between, or once after the position was tried again: the job then goes on with fewer
ranks, on the other positions. Nothing here starts a process, reads a clock or imports Paddle.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fleetpipe.job import attempt_files
from fleetpipe.job.attempt_files import Failure
from fleetpipe.job.watch import EXIT_CODE
from fleetpipe.launch.script import shell_exit_code

#: The variable with the cards that a process sees; Paddle's launcher gives each rank one of them.
_CARDS = "CUDA_VISIBLE_DEVICES"
#: A file that exists if the host has a driver of cards.
_CARDS_DRIVER = "/dev/nvidiactl"

#: The most lines of a traceback that are shown.
_MOST_LINES = 12
#: What to do about a full disk.
_FREE_SPACE = "free space on the disk that the error above names, which is full"
#: By the text of an error of the disk, which is not the fault of a step, what to do about it.
_DISK_REMEDIES = {
    os.strerror(errno.ENOSPC): _FREE_SPACE,
    os.strerror(errno.EDQUOT): _FREE_SPACE,
    **dict.fromkeys(
        (os.strerror(errno.EFBIG), "SIGXFSZ"),
        "raise the limit on the size of a file, which ulimit -f shows, where the job is started",
    ),
}

#: The exit code of a job in which one step failed twice in a row: EX_DATAERR.
POISONED = 65


class RankPositions(NamedTuple):
    """Which positions of the host, such as its GPUs by number, have a rank in an attempt.

    Attributes:
        used: The positions that have a rank, ascending; empty if all have one.
        lost: The positions that were given up, also while all positions are tried again.
        total: The number of all positions; 0 until one is given up.
        remaining: The number of positions with a rank after one was last given up.
        since: While ``used`` is not empty, the step in which the last position was given up; else
            the number of steps after which all positions got a rank again. None if there is none.
        seconds: The seconds after which positions that were given up are tried again.
    """

    used: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    total: int = 0
    remaining: int = 0
    since: int | None = None
    seconds: float = 0.0

    @property
    def ranks(self) -> int:
        """The number of ranks; 0 if it is not known."""
        return len(self.used) or self.total

    def fails_trial(self, rank: int, step: int | None) -> bool:
        """Returns whether a rank failed in its first step on a position that is tried again.

        Args:
            rank: The rank that failed.
            step: The step in which it failed; None before the first step.
        """
        # All positions have a rank, so that a rank's number is that of its position; this one was
        # given up before; and the step is the first one since all have a rank again.
        return not self.used and rank in self.lost and step in (None, self.since)

    def without(
        self, rank: int, ranks: int, fewer: int, step: int | None, seconds: float
    ) -> RankPositions:
        """Returns the positions of the next attempt: without a failed rank's, and ``fewer`` in all.

        Args:
            rank: The rank whose position is given up.
            ranks: The number of ranks now.
            fewer: The number of ranks in the next attempt, below ``ranks``.
            step: The step in which the rank failed.
            seconds: The seconds after which a position is tried again.
        """
        # Rank n is on position ``used[n]``.
        used = self.used or tuple(range(ranks))
        working = tuple(position for position in used if position != used[rank])
        lost = (*self.lost, used[rank])
        return RankPositions(working[:fewer], lost, max(self.total, ranks), fewer, step, seconds)

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns variables for the ranks: the number of all positions, and the GPUs to use.

        Args:
            inherited: The environment of this process.
        """
        if not self.used:
            return {}
        # Without the variable a process sees all cards of the host, by their numbers.
        numbers = map(str, range(self.total)) if os.path.exists(_CARDS_DRIVER) else ()
        names = inherited[_CARDS].split(",") if _CARDS in inherited else [*numbers]
        used_cards = [names[position] for position in self.used if position < len(names)]
        used_cards = [name for name in used_cards if name]
        cards = {_CARDS: ",".join(used_cards)} if used_cards else {}
        return {attempt_files.WHOLE_SIZE: str(self.total), **cards}


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended.

    Attributes:
        code: 0 if every rank succeeded; else the exit code of the rank that failed first, as a
            shell shows it: 128 + n after signal n.
        saved: Number of steps saved, if the attempt was asked to end; else None.
        step: The step in which the first rank failed; None before the first step.
        culprit: The rank that failed first, and how, in words; empty if none failed.
        details: The end of its traceback, or the stacks of all ranks.
        raised: Whether it raised an error, which a restart may repeat.
        permanent: Whether a restart cannot cure that error.
        shown: Whether the terminal has shown that error already.
        done: Number of steps that the pipeline did in the attempt; None if ``step`` is known.
        suspect: The rank whose position may be at fault: it died first, or only it raised an error
            before the first step, or it hung and others waited for it; else None.
        died: The ranks whose last process was ended by a signal.
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
    suspect: int | None = None
    died: frozenset[int] = frozenset()

    def repeats(self, earlier: Verdict) -> bool:
        """Returns whether this failure is the same as that of an earlier attempt.

        Two failures are the same in the same step. Before the first step, in which a rank may be
        killed while it starts, they are the same if both raised the same kind of error in the same
        line.
        """
        if self.step is not None or earlier.step is not None:
            return self.step == earlier.step
        return self.raised and earlier.raised and self._cause() == earlier._cause()

    @property
    def disk_full(self) -> str:
        """What the user can do, if a full disk or a limit on files caused the failure; else ""."""
        words = f"{self.culprit}\n{self.details}"
        return next((to_do for error, to_do in _DISK_REMEDIES.items() if error in words), "")

    def _cause(self) -> tuple[str, list[str]]:
        """Returns the error's class, and a list of the line that raised it; [] if it is unknown.

        The message is left out, as it may contain a time or an address; so is the rank.
        """
        _, _, error = self.culprit.partition(" raised: ")
        return error.partition(":")[0], re.findall(r'File "[^"]+", line \d+', self.details)[-1:]


def judge(directory: Path, code: int, shown: int | None = None) -> Verdict:
    """Returns how an attempt ended, by what its ranks and its launcher wrote into its folder.

    Args:
        directory: The folder of the attempt.
        code: The exit code of the launcher.
        shown: The rank whose output is on the terminal; None if no rank's is.
    """
    saved = attempt_files.steps_saved_at_stop(directory)
    if code == 0 or saved is not None:
        return Verdict(code, saved)
    steps = attempt_files.steps_begun(directory)
    rank, failed, failure = _find_first_failure(directory)
    if rank is None:
        return Verdict(code, culprit=f"Paddle's launcher ended with {code}")
    step = steps.get(rank, max(steps.values(), default=None))
    done = attempt_files.steps_done(directory) if step is None else None
    name, code = f"rank {rank}", shell_exit_code(failed) or code
    last = dict(attempt_files.ended_ranks(directory))  # a rank that was replaced has ended twice
    died = frozenset(each for each, last_code in last.items() if last_code < 0)
    if failure is None:
        words = f"{name} {_describe_exit(failed)} without a word"
        return Verdict(code, None, step, words, done=done, suspect=rank, died=died)
    signalled = f" ({_describe_exit(failed)})" if failed < 0 else ""
    words = f"{name} {failure.what}{signalled}: {failure.text}"
    details = "\n".join(failure.details.rstrip().splitlines()[-_MOST_LINES:])
    raised = failure.what == "raised"
    raising = {report.failure.rank for report in attempt_files.failures(directory)}
    is_suspect = failure.what == "died" or (raised and step is None and raising == {rank})
    suspect = rank if is_suspect else None
    if failure.what == "timed out" and len(died) == 1:
        (suspect,) = died  # a rank that hangs is killed in the end
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
        suspect=suspect,
        died=died,
    )


def _find_first_failure(directory: Path) -> tuple[int | None, int, Failure | None]:
    """Returns the rank that failed first, its exit code, and its failure record.

    Returns:
        (None, 0, None) if no rank has failed; the record is None if the rank wrote none.
    """
    failures = [report.failure for report in attempt_files.failures(directory)]
    # The exit codes in the order in which the processes ended, as (rank, code).
    ended = [
        (rank, attempt_files.reported_exit_code(directory, rank) or code)
        for rank, code in attempt_files.ended_ranks(directory)
    ]
    failed = [(rank, code) for rank, code in ended if code]
    # A rank that ends with EXIT_CODE does so because another one has failed.
    culprits = [(rank, code) for rank, code in failed if code != EXIT_CODE] or failed
    if not culprits and not failures:
        return None, 0, None
    rank, code = culprits[0] if culprits else (failures[0].rank, 0)
    # A process that is ended by a signal leaves no record, and other ranks fail after it.
    if failures and not (code < 0 and culprits[0] == failed[0]):
        rank = failures[0].rank
    report = [failure for failure in failures if failure.rank == rank]
    # The first code of a rank that was replaced: the launcher may have ended its last process.
    return rank, dict(reversed(failed)).get(rank, 0), report[0] if report else None


def _describe_exit(code: int) -> str:
    """Returns in words how a process ended; its exit code is -n if signal n ended it."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class Attempt(NamedTuple):
    """One start of a job's ranks: its number, the failures before it, the positions used.

    Attributes:
        number: The number, from 1.
        restarts: Number of earlier attempts that failed.
        failed: The failure of the last attempt; None if there was none.
        positions: The positions that have a rank.
    """

    number: int = 1
    restarts: int = 0
    failed: Verdict | None = None
    positions: RankPositions = RankPositions()


class EndJob(NamedTuple):
    """The decision that the job ends.

    Attributes:
        code: The exit code of the job.
        lines: Lines for the user.
    """

    code: int
    lines: tuple[str, ...] = ()


class RestartJob(NamedTuple):
    """The decision that the job is started again.

    Attributes:
        attempt: The next attempt.
        lines: Lines for the user.
    """

    attempt: Attempt
    lines: tuple[str, ...]


def with_interrupt(verdict: Verdict, stopped_by: int | None) -> Verdict:
    """Returns the verdict on an attempt, which is "interrupted" if Ctrl-C has ended the job.

    Args:
        verdict: The verdict by the attempt's records.
        stopped_by: The first signal that asked the job to stop; None if none did.
    """
    if stopped_by != signal.SIGINT or verdict == Verdict(0):
        return verdict
    return replace(verdict, code=attempt_files.INTERRUPTED, culprit="interrupted", details="")


def decide_next(
    attempt: Attempt,
    verdict: Verdict,
    max_restart: int,
    stopped_by: int | None = None,
) -> EndJob | RestartJob:
    """Decides what follows an attempt that has ended, in a job whose number of ranks is fixed.

    Args:
        attempt: The attempt.
        verdict: How it ended, from :func:`with_interrupt`.
        max_restart: The largest number of restarts.
        stopped_by: The first signal that asked the job to stop; None if none did.
    """
    interrupted = verdict.code == attempt_files.INTERRUPTED and stopped_by == signal.SIGINT
    if verdict.saved is not None:
        code = attempt_files.INTERRUPTED if interrupted else attempt_files.PREEMPTED
        return EndJob(code, (attempt_files.how_to_go_on(interrupted, verdict.saved),))
    if interrupted:
        return EndJob(attempt_files.INTERRUPTED, ("interrupted",))
    if verdict.code == 0:
        return EndJob(0)
    return _decide_after_failure(attempt, verdict, max_restart, stopped_by)


def _decide_after_failure(
    attempt: Attempt, verdict: Verdict, max_restart: int, stopped_by: int | None
) -> EndJob | RestartJob:
    """Decides what follows a failed attempt, for :func:`decide_next` with its arguments."""
    failure = _describe_failure(attempt.number, verdict)
    if stopped_by is not None:
        line = f"asked to stop by {signal.Signals(stopped_by).name}, the job saved nothing: "
        line += "a script saves first where it goes by fleetpipe.resume, within --grace"
        return EndJob(shell_exit_code(-stopped_by), (failure, line))
    if verdict.permanent:
        return EndJob(verdict.code, (failure, "no restart mends this error: the job has failed"))
    if attempt.failed is not None and verdict.repeats(attempt.failed):
        is_step_at_fault = verdict.step is not None and not verdict.disk_full
        code = POISONED if is_step_at_fault else verdict.code
        return EndJob(code, (failure, _explain_repetition(verdict)))
    if attempt.restarts == max_restart:
        why = f"all {max_restart} restarts are used: the job has failed"
        return EndJob(verdict.code, (failure, why))
    following = Attempt(attempt.number + 1, attempt.restarts + 1, verdict, attempt.positions)
    line = f"attempt {following.number} begins: restart {following.restarts} of {max_restart}"
    return RestartJob(following, (failure, line))


def _describe_failure(number: int, verdict: Verdict) -> str:
    """Returns for the user how attempt ``number`` failed."""
    when = _describe_progress(verdict) if verdict.step is None else f" in step {verdict.step}"
    first, *more = f"attempt {number} ended{when}: {verdict.culprit}".splitlines()
    if verdict.shown:
        return first
    return "\n".join([first, *more, *(f"    | {line}" for line in verdict.details.splitlines())])


def _describe_progress(verdict: Verdict) -> str:
    """Returns a phrase that says how many steps ran; "" if the step that failed is known."""
    if verdict.done is None:
        return ""
    steps = "1 step" if verdict.done == 1 else f"{verdict.done} steps"
    return f" after {steps}" if verdict.done else " (no step ran)"


def _explain_repetition(verdict: Verdict) -> str:
    """Returns for the user why a job that failed twice in the same way is not restarted."""
    what = f"the job failed twice in a row with the same error{_describe_progress(verdict)}"
    if verdict.step is not None:
        what = f"step {verdict.step} failed twice in a row"
    to_do = verdict.disk_full or "look at the data of this step and at the error above"
    return (
        f"{what}: it is not started again\n"
        f"  what to do: {to_do}; a job that is started anew goes on from its checkpoint"
    )


class KeptRanks(NamedTuple):
    """The newest step whose state the ranks have stored in memory.

    Attributes:
        step: The number of steps done then.
        ranks: The number of ranks that have stored this state.
        smaller: The smaller numbers of ranks that the script's degrees allow, in descending order.
    """

    step: int
    ranks: int
    smaller: tuple[int, ...]

    def fewer(self, ranks: int) -> int:
        """Returns the largest number of ranks below ``ranks`` that is allowed; 0 if none is."""
        return next((number for number in self.smaller if number < ranks), 0)


def decide_with_fewer(
    attempt: Attempt,
    verdict: Verdict,
    default: EndJob | RestartJob,
    kept: Callable[[], KeptRanks | None],
    least: int,
    seconds: float,
) -> EndJob | RestartJob:
    """Decides what follows an attempt that failed, in a job that may go on with fewer ranks.

    Args:
        attempt: The attempt.
        verdict: How it ended.
        default: The decision if no position is given up.
        kept: Returns the newest state that the ranks have stored; None if there is none.
        least: The smallest number of ranks.
        seconds: The seconds after which a position is tried again.
    """
    rank, before, newest = verdict.suspect, attempt.positions, kept()
    if newest is None:
        return default
    if verdict.permanent and before.used and newest.ranks != len(before.used):
        # The script refuses these ranks before a first step: its layers may not divide so.
        refused = len(before.used)
        fewer = newest.fewer(refused)
        if fewer < least:
            return default
        positions = before._replace(used=before.used[:fewer], remaining=fewer)
        why = f"the script refuses {refused} ranks"
        return _decide_fewer(attempt, why, newest.step, positions, default)
    if rank is None or verdict.permanent:
        return default
    # A trial of given-up positions lasts until all ranks together have stored a step: until then
    # the newest state is still that of the fewer ranks.
    fails_trial = before.fails_trial(rank, verdict.step) and newest.ranks == before.remaining
    if not fails_trial and not _is_given_up(attempt, verdict, rank, default):
        return default
    ranks = before.ranks or newest.ranks
    fewer = before.remaining if fails_trial else newest.fewer(ranks)
    if fewer < least:
        why = f"--least {least} allows no fewer ranks" if fewer else "the script takes no fewer"
        return default._replace(lines=(*default.lines, f"rank {rank} is not given up: {why}"))
    seconds = 2 * before.seconds if fails_trial else seconds
    positions = before.without(rank, ranks, fewer, verdict.step, seconds)
    why = f"rank {rank} is given up, and tried again after {seconds:g} s"
    return _decide_fewer(attempt, why, newest.step, positions, default)


def _decide_fewer(
    attempt: Attempt, why: str, step: int, positions: RankPositions, default: EndJob | RestartJob
) -> RestartJob:
    """Returns the decision to go on with fewer ranks.

    Args:
        attempt: The attempt that failed.
        why: Why, for the user.
        step: The number of steps after which the job goes on.
        positions: The positions of the next attempt.
        default: The decision if no position were given up; its first line describes the failure.
    """
    count = "1 rank" if positions.remaining == 1 else f"{positions.remaining} ranks"
    line = (
        f"{why}: the job goes on after {step} steps, from memory, with {count} of {positions.total}"
    )
    return RestartJob(Attempt(attempt.number + 1, positions=positions), (default.lines[0], line))


def decide_with_all(attempt: Attempt, step: int) -> RestartJob:
    """Returns the decision to start all ranks again after ``step`` steps, on all positions."""
    positions = attempt.positions._replace(used=(), since=step)
    line = f"after {step} steps the job goes on with all {positions.total} ranks again"
    return RestartJob(Attempt(attempt.number + 1, attempt.restarts, positions=positions), (line,))


def decide_with_as_many(attempt: Attempt, default: EndJob | RestartJob) -> RestartJob:
    """Returns the decision to go on with as many ranks after they failed to save and end.

    Fewer ranks were asked to save and end, so that all ranks could start again; they failed, as on
    a full disk. As many ranks go on from memory, and are asked again later.

    Args:
        attempt: The attempt that failed.
        default: The decision in a job whose number of ranks is fixed.
    """
    positions = attempt.positions._replace(seconds=2 * attempt.positions.seconds)
    line = f"as many ranks go on, and all of them are tried after {positions.seconds:g} s"
    following = Attempt(attempt.number + 1, attempt.restarts, positions=positions)
    return RestartJob(following, (default.lines[0], line))


def _is_given_up(
    attempt: Attempt, verdict: Verdict, rank: int, default: EndJob | RestartJob
) -> bool:
    """Returns whether a failed rank's position on the host counts as broken, and gets no rank.

    Args:
        attempt: The attempt that failed.
        verdict: How it ended.
        rank: The rank.
        default: The decision if the position is not given up.
    """
    positions, before = attempt.positions, attempt.failed
    if positions.used and verdict.step is not None and verdict.step == positions.since:
        return False  # the step fails on other positions too
    # Whether the job ends if no position is given up: then the failure of one rank may be enough.
    ends = isinstance(default, EndJob)
    if before is None:
        return ends
    if before.suspect == rank or rank in before.died:  # two positions may break at once
        # The rank has failed twice without a step in between.
        return ends or verdict.step in (None, before.step)
    # Another rank failed before: if in the same way, the step or the script is at fault.
    return ends and not verdict.repeats(before)
