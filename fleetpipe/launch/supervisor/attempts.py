"""Judges how an attempt ended, and decides whether the job restarts, on how many ranks, or ends.

Start with :func:`judge`, which returns a ``Verdict``: which rank failed first, in which step, and
with which error; then :func:`after`. A place is the position of a rank on the host; it is given up
when its rank has failed twice without a step in between, or once after it was tried again. Nothing
here starts a process, reads a clock or imports Paddle.
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
from fleetpipe.launch.script import in_a_shell

#: The variable with the cards that a process sees; Paddle's launcher gives each rank one of them.
_CARDS = "CUDA_VISIBLE_DEVICES"
#: A file that exists if the host has a driver of cards.
_CARDS_DRIVER = "/dev/nvidiactl"

#: The most lines of a traceback that are shown.
_MOST_LINES = 12
_FREE_SPACE = "free space on the disk that the error above names, which is full"
#: By the text of an error of the disk, which is not the fault of a step, what to do about it.
_OF_THE_DISK = {
    os.strerror(errno.ENOSPC): _FREE_SPACE,
    os.strerror(errno.EDQUOT): _FREE_SPACE,
    **dict.fromkeys(
        (os.strerror(errno.EFBIG), "SIGXFSZ"),
        "raise the limit on the size of a file, which ulimit -f shows, where the job is started",
    ),
}

#: The exit code of a job in which one step failed twice in a row: EX_DATAERR.
POISONED = 65


class Width(NamedTuple):
    """The places that have a rank in an attempt.

    Attributes:
        places: The numbers of these places, ascending; empty if all places have a rank.
        lost: The places that were given up, also while they are tried again.
        whole: The number of all places; 0 until a place is given up.
        left: The number of places with a rank after a place was last given up.
        since: The step in which a place was given up, or after which all have a rank again.
        seconds: The seconds after which places that were given up are tried again.
    """

    places: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    whole: int = 0
    left: int = 0
    since: int | None = None
    seconds: float = 0.0

    @property
    def ranks(self) -> int:
        """The number of ranks; 0 if it is unknown."""
        return len(self.places) or self.whole

    def fails_trial(self, rank: int, step: int | None) -> bool:
        """Whether a rank that failed in ``step`` was in its first step on a place tried again."""
        return not self.places and rank in self.lost and step in (None, self.since)

    def without(self, rank: int, ranks: int, left: int, step: int | None, seconds: float) -> Width:
        """Returns the width without the place of a rank.

        Args:
            rank: The rank.
            ranks: The number of ranks now.
            left: The number of ranks in the next attempt.
            step: The step in which the rank failed.
            seconds: The seconds after which a place is tried again.
        """
        places = self.places or tuple(range(ranks))
        working = tuple(place for place in places if place != places[rank])
        lost = (*self.lost, places[rank])
        return Width(working[:left], lost, max(self.whole, ranks), left, step, seconds)

    def with_fewer(self, left: int) -> Width:
        """Returns the width in which only the first ``left`` of the places have a rank."""
        return self._replace(places=self.places[:left], left=left)

    def with_all(self, step: int) -> Width:
        """Returns the width in which all places have a rank again after ``step`` steps."""
        return self._replace(places=(), since=step)

    def environment(self, here: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the variables for the ranks: the number of all places, and the cards left.

        Args:
            here: The environment of this process.
        """
        if not self.places:
            return {}
        # Without the variable a process sees all cards of the host, by their numbers.
        usual = map(str, range(self.whole)) if os.path.exists(_CARDS_DRIVER) else ()
        names = here[_CARDS].split(",") if _CARDS in here else [*usual]
        seen = [names[place] for place in self.places if place < len(names) and names[place]]
        cards = {_CARDS: ",".join(seen)} if seen else {}
        return {attempt_files.WHOLE_SIZE: str(self.whole), **cards}


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended.

    Attributes:
        code: 0 if every rank succeeded; else the code of the rank that failed first, as a shell
            shows it.
        saved: Number of steps saved, if the attempt was asked to end; else None.
        step: The step in which the first rank failed; None before the first step.
        culprit: The rank that failed first, and how, in words; empty if none failed.
        details: The end of its traceback, or the stacks of all ranks.
        raised: Whether it raised an error, which a restart may repeat.
        permanent: Whether a restart cannot cure that error.
        shown: Whether the terminal has shown that error already.
        done: Number of steps that the pipeline did in the attempt; None if ``step`` is known.
        place: The rank whose place may be at fault: it died first, or only it raised an error
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
    place: int | None = None
    died: frozenset[int] = frozenset()

    def repeats(self, other: Verdict) -> bool:
        """Whether this failure is the same as ``other``.

        Two failures are the same in the same step. Before the first step, in which a rank may be
        killed while it starts, they are if both raised the same kind of error in the same line.
        """
        if self.step is None or other.step is None:
            both = self.raised and other.raised
            return self.step is other.step and both and self._cause() == other._cause()
        return self.step == other.step

    @property
    def disk_full(self) -> str:
        """What to do about a full disk, so that the step is not at fault; else an empty text."""
        words = f"{self.culprit}\n{self.details}"
        return next((to_do for error, to_do in _OF_THE_DISK.items() if error in words), "")

    def _cause(self) -> tuple[str, list[str]]:
        """Returns the kind of the error, and the line of code that raised it.

        The message is left out, as it may contain a time or an address; so is the rank.
        """
        _, _, error = self.culprit.partition(" raised: ")
        return error.partition(":")[0], re.findall(r'File "[^"]+", line \d+', self.details)[-1:]


def judge(home: Path, code: int, shown: int | None = None) -> Verdict:
    """Judges an attempt by the records of its ranks and its launcher in its folder.

    Args:
        home: The folder of the attempt.
        code: The exit code of the launcher.
        shown: The rank whose output is on the terminal; None if no rank's is.
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
    last = dict(attempt_files.ended_ranks(home))  # a rank that was replaced has ended twice
    died = frozenset(one for one, how in last.items() if how < 0)
    if failure is None:
        words = f"{who} {_in_words(failed)} without a word"
        return Verdict(code, None, step, words, done=done, place=rank, died=died)
    signalled = f" ({_in_words(failed)})" if failed < 0 else ""
    words = f"{who} {failure.what}{signalled}: {failure.text}"
    details = "\n".join(failure.details.rstrip().splitlines()[-_MOST_LINES:])
    raised = failure.what == "raised"
    raising = {report.failure.rank for report in attempt_files.failures(home)}
    of_place = failure.what == "died" or (raised and step is None and raising == {rank})
    place = rank if of_place else None
    if failure.what == "timed out" and len(died) == 1:
        (place,) = died  # a rank that hangs is killed in the end
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
        place=place,
        died=died,
    )


def _first(home: Path) -> tuple[int | None, int, Failure | None]:
    """Returns the rank that failed first, its exit code, and its failure record."""
    failures = [report.failure for report in attempt_files.failures(home)]
    ended = [
        (rank, attempt_files.code_of(home, rank) or code)
        for rank, code in attempt_files.ended_ranks(home)
    ]
    failed = [(rank, code) for rank, code in ended if code]
    culprits = [(rank, code) for rank, code in failed if code != EXIT_CODE] or failed
    # A process that is ended by a signal leaves no record, and other ranks fail after it.
    if culprits and culprits[0][1] < 0 and culprits[0] == failed[0]:
        rank = culprits[0][0]
    elif failures:
        rank = failures[0].rank
    elif culprits:
        rank = culprits[0][0]
    else:
        return None, 0, None
    report = [failure for failure in failures if failure.rank == rank]
    # The first code of a rank that was replaced: the launcher may have ended its last process.
    return rank, dict(reversed(failed)).get(rank, 0), report[0] if report else None


def _in_words(code: int) -> str:
    """Returns how a process ended, by its exit code, which is -n if signal n ended it."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class Attempt(NamedTuple):
    """The number of an attempt, and the failures before it.

    Attributes:
        number: The number, from 1.
        restarts: Number of earlier attempts that failed.
        failed: The failure of the last attempt; None if there was none.
        width: The places that have a rank.
    """

    number: int = 1
    restarts: int = 0
    failed: Verdict | None = None
    width: Width = Width()


class End(NamedTuple):
    """The decision that the job ends.

    Attributes:
        code: The exit code of the job.
        said: Lines for the user.
    """

    code: int
    said: tuple[str, ...] = ()


class Again(NamedTuple):
    """The decision that the job is started again.

    Attributes:
        attempt: The next attempt.
        said: Lines for the user.
    """

    attempt: Attempt
    said: tuple[str, ...]


def with_interrupt(verdict: Verdict, stopped_by: int | None) -> Verdict:
    """Returns the verdict on an attempt; if Ctrl-C has ended it, the verdict is "interrupted".

    Args:
        verdict: The verdict by its records.
        stopped_by: The first signal that asked the job to stop; None if none did.
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
        verdict: Its verdict from :func:`with_interrupt`.
        max_restart: The largest number of restarts.
        stopped_by: The first signal that asked the job to stop; None if none did.
    """
    interrupted = verdict.code == attempt_files.INTERRUPTED and stopped_by == signal.SIGINT
    if verdict.saved is not None:
        code = attempt_files.INTERRUPTED if interrupted else attempt_files.PREEMPTED
        return End(code, (attempt_files.how_to_go_on(interrupted, verdict.saved),))
    if interrupted:
        return End(attempt_files.INTERRUPTED, ("interrupted",))
    if verdict.code == 0:
        return End(0)
    return _after_failure(attempt, verdict, max_restart, stopped_by)


def _after_failure(
    attempt: Attempt, verdict: Verdict, max_restart: int, stopped_by: int | None
) -> End | Again:
    """Decides what follows an attempt that has failed; see :func:`after`."""
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
    following = Attempt(attempt.number + 1, attempt.restarts + 1, verdict, attempt.width)
    begins = f"attempt {following.number} begins: restart {following.restarts} of {max_restart}"
    return Again(following, (account, begins))


def _account(number: int, verdict: Verdict) -> str:
    """Returns a text that says how an attempt failed."""
    when = _progress(verdict) if verdict.step is None else f" in step {verdict.step}"
    first, *more = f"attempt {number} ended{when}: {verdict.culprit}".splitlines()
    if verdict.shown:
        return first
    return "\n".join([first, *more, *(f"    | {line}" for line in verdict.details.splitlines())])


def _progress(verdict: Verdict) -> str:
    """Returns a text with the steps that ran, for an attempt whose script reports no step."""
    if verdict.done is None:
        return ""
    steps = "1 step" if verdict.done == 1 else f"{verdict.done} steps"
    return f" after {steps}" if verdict.done else " (no step ran)"


def _poison(verdict: Verdict) -> str:
    """Returns a text that says why a job that failed twice in the same way is not restarted."""
    what = f"the job failed twice in a row with the same error{_progress(verdict)}"
    if verdict.step is not None:
        what = f"step {verdict.step} failed twice in a row"
    to_do = verdict.disk_full or "look at the data of this step and at the error above"
    return (
        f"{what}: it is not started again\n"
        f"  what to do: {to_do}; a job that is started anew goes on from its checkpoint"
    )


class KeptRanks(NamedTuple):
    """The state that the ranks have kept in memory.

    Attributes:
        step: The newest step.
        ranks: The number of ranks that have kept this step.
        smaller: The smaller numbers of ranks that the script's degrees allow, in descending order.
    """

    step: int
    ranks: int
    smaller: tuple[int, ...]

    def fewer(self, ranks: int) -> int:
        """Returns the largest number of ranks below ``ranks`` that the degrees allow, or 0."""
        return next((number for number in self.smaller if number < ranks), 0)


def with_fewer(
    attempt: Attempt,
    verdict: Verdict,
    then: End | Again,
    kept: Callable[[], KeptRanks | None],
    least: int,
    seconds: float,
) -> End | Again:
    """Decides what follows an attempt that failed, in a job that may go on with fewer ranks.

    Args:
        attempt: The attempt.
        verdict: How it ended.
        then: The decision if no place is given up.
        kept: Returns the state that the ranks have kept; None if they have kept no step.
        least: The smallest number of ranks.
        seconds: The seconds after which a place is tried again.
    """
    rank, before, newest = verdict.place, attempt.width, kept()
    if newest is None:
        return then
    if verdict.permanent and before.places and newest.ranks != len(before.places):
        # The script refuses these ranks before a first step: its layers may not divide so.
        refused = len(before.places)
        fewer = newest.fewer(refused)
        if fewer < least:
            return then
        why, width = f"the script refuses {refused} ranks", before.with_fewer(fewer)
        return _goes_on(attempt, why, newest.step, width, then)
    if rank is None or verdict.permanent:
        return then
    # A trial lasts until all ranks have kept a step.
    again = before.fails_trial(rank, verdict.step) and newest.ranks == before.left
    if not again and not _is_lost(attempt, verdict, rank, then):
        return then
    ranks = before.ranks or newest.ranks
    fewer = before.left if again else newest.fewer(ranks)
    if fewer < least:
        why = f"--least {least} allows no fewer ranks" if fewer else "the script takes no fewer"
        return then._replace(said=(*then.said, f"rank {rank} is not given up: {why}"))
    seconds = 2 * before.seconds if again else seconds
    width = before.without(rank, ranks, fewer, verdict.step, seconds)
    lost = f"rank {rank} is given up, and tried again after {seconds:g} s"
    return _goes_on(attempt, lost, newest.step, width, then)


def _goes_on(attempt: Attempt, why: str, step: int, width: Width, then: End | Again) -> Again:
    """Returns the decision to go on with fewer ranks, and its lines for the user."""
    count = "1 rank" if width.left == 1 else f"{width.left} ranks"
    said = f"{why}: the job goes on after {step} steps, from memory, with {count} of {width.whole}"
    return Again(Attempt(attempt.number + 1, width=width), (then.said[0], said))


def with_all(attempt: Attempt, step: int) -> Again:
    """Returns the decision to start all ranks again, on places that were given up too."""
    width = attempt.width.with_all(step)
    said = f"after {step} steps the job goes on with all {width.whole} ranks again"
    return Again(Attempt(attempt.number + 1, attempt.restarts, width=width), (said,))


def with_as_many(attempt: Attempt, then: End | Again) -> Again:
    """Returns the decision to go on with as many ranks, after they failed to save and end.

    They were asked to, so that all ranks start again; a disk may be full. They go on from memory,
    and are asked again later.
    """
    width = attempt.width._replace(seconds=2 * attempt.width.seconds)
    said = f"as many ranks go on, and all of them are tried after {width.seconds:g} s"
    following = Attempt(attempt.number + 1, attempt.restarts, width=width)
    return Again(following, (then.said[0], said))


def _is_lost(attempt: Attempt, verdict: Verdict, rank: int, then: End | Again) -> bool:
    """Whether the place of a rank, which failed first, is given up."""
    width, before = attempt.width, attempt.failed
    if width.places and verdict.step is not None and verdict.step == width.since:
        return False  # the step fails on other places too
    ends = isinstance(then, End)
    if before is None:
        return ends
    if before.place == rank or rank in before.died:  # two places may break at once
        return ends or verdict.step in (None, before.step)
    return ends and not verdict.repeats(before)
