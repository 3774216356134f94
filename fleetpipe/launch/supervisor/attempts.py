"""Judges how an attempt ended, and decides whether the job restarts, on how many ranks, or ends.

The verdict says which rank failed first, in which step, and with which error. A place is given up
when its rank has failed twice without a step between, or once after it was tried again. Nothing
here starts a process, reads a clock or loads Paddle.
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

#: Which cards a process sees; Paddle's launcher gives each rank one of them.
_CARDS = "CUDA_VISIBLE_DEVICES"
#: Is there where a driver of cards is.
_CARDS_DRIVER = "/dev/nvidiactl"


class Width(NamedTuple):
    """The places that have a rank in an attempt.

    Attributes:
        places: Their numbers, ascending; empty if all have one.
        lost: Those that were given up, also while they are tried again.
        whole: How many there are; 0 until one is given up.
        left: How many had a rank when one was given up last.
        since: The step in which one was given up, or after which all have a rank again.
        seconds: After how long those that were given up are tried again.
    """

    places: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    whole: int = 0
    left: int = 0
    since: int | None = None
    seconds: float = 0.0

    @property
    def ranks(self) -> int:
        """How many ranks there are; 0 if that is not known."""
        return len(self.places) or self.whole

    def fails_trial(self, rank: int, step: int | None) -> bool:
        """Whether a rank on a place that is tried again has failed in its first step there."""
        return not self.places and rank in self.lost and step in (None, self.since)

    def without(self, rank: int, ranks: int, left: int, step: int | None, seconds: float) -> Width:
        """Returns the width without the place of a rank.

        Args:
            rank: The rank.
            ranks: How many there are now.
            left: How many there are to be.
            step: The step in which it failed.
            seconds: After how long a place is tried again.
        """
        places = self.places or tuple(range(ranks))
        working = tuple(place for place in places if place != places[rank])
        lost = (*self.lost, places[rank])
        return Width(working[:left], lost, max(self.whole, ranks), left, step, seconds)

    def with_fewer(self, left: int) -> Width:
        """Returns the width in which only so many of the places have a rank."""
        return self._replace(places=self.places[:left], left=left)

    def with_all(self, step: int) -> Width:
        """Returns the width in which all places have a rank again after some steps."""
        return self._replace(places=(), since=step)

    def environment(self, here: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns what the ranks of this width have in their environment."""
        if not self.places:
            return {}
        names = here.get(_CARDS, "").split(",") if _CARDS in here else _all_cards(self.whole)
        seen = [names[place] for place in self.places if place < len(names) and names[place]]
        cards = {_CARDS: ",".join(seen)} if seen else {}
        return {attempt_files.WHOLE_SIZE: str(self.whole), **cards}


def _all_cards(places: int) -> list[str]:
    """Returns the numbers of the cards of a host on which no variable names some."""
    return [str(place) for place in range(places)] if os.path.exists(_CARDS_DRIVER) else []


_MOST_LINES = 12
_FREE_SPACE = "free space on the disk that the error above names, which is full"
#: What to do about errors of a disk, which are not the fault of a step, by their words.
_OF_THE_DISK = {
    os.strerror(errno.ENOSPC): _FREE_SPACE,
    os.strerror(errno.EDQUOT): _FREE_SPACE,
    **dict.fromkeys(
        (os.strerror(errno.EFBIG), "SIGXFSZ"),
        "raise the limit on the size of a file, which ulimit -f shows, where the job is started",
    ),
}


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended.

    Attributes:
        code: 0 if every rank succeeded; else the code of the rank that failed first, as a shell
            shows it.
        saved: Number of steps saved, if the attempt was asked to end; else None.
        step: The step in which the first rank failed; None before the first step.
        culprit: The rank that failed first, and how; empty if none did.
        details: The end of its traceback, or the places of all ranks.
        raised: Whether it raised an error, which a restart may repeat.
        permanent: Whether a restart cannot cure that error.
        shown: Whether the terminal has shown that error already.
        done: Number of steps that the pipeline did in the attempt; None if ``step`` is known.
        place: The rank that failed first, if what it runs on may be at fault: it died, or it alone
            raised before the first step; or the one that hung, where others waited for it.
        died: The ranks whose last process a signal ended.
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

        It is if both failed in the same step; before any step, when a rank may have been killed
        while it loaded, if both raised the same kind of error in the same line.
        """
        if self.step is None or other.step is None:
            both = self.raised and other.raised
            return self.step is other.step and both and self._cause() == other._cause()
        return self.step == other.step

    @property
    def disk_full(self) -> str:
        """What to do about a disk that took no more, so the step is not at fault; else empty."""
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
        shown: The rank whose output is on the terminal; None if there is none.
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
        (place,) = died  # one that hangs does not even end
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
    # Of one that was replaced the first: the launcher may have ended the last for the other ranks.
    return rank, dict(reversed(failed)).get(rank, 0), report[0] if report else None


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
    """The number of an attempt, and the failures before it.

    Attributes:
        number: Its number, from 1.
        restarts: Number of earlier attempts that failed.
        failed: The failure of the attempt before; None if there was none.
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
    """Returns the verdict on an attempt: interrupted if Ctrl-C ended it, whatever its records.

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
    said, *more = f"attempt {number} ended{when}: {verdict.culprit}".splitlines()
    if verdict.shown:
        return said
    return "\n".join([said, *more, *(f"    | {line}" for line in verdict.details.splitlines())])


def _progress(verdict: Verdict) -> str:
    """Returns a text with the steps that ran, for an attempt whose script reports no step."""
    if verdict.done is None:
        return ""
    steps = "1 step" if verdict.done == 1 else f"{verdict.done} steps"
    return f" after {steps}" if verdict.done else " (no step ran)"


def _poison(verdict: Verdict) -> str:
    """Returns a text that says why a job that failed twice alike is not restarted."""
    what = f"the job failed twice in a row with the same error{_progress(verdict)}"
    if verdict.step is not None:
        what = f"step {verdict.step} failed twice in a row"
    to_do = verdict.disk_full or "look at the data of this step and at the error above"
    return (
        f"{what}: it is not started again\n"
        f"  what to do: {to_do}; a job that is started anew goes on from its checkpoint"
    )


class KeptRanks(NamedTuple):
    """What the ranks have kept in memory.

    Attributes:
        step: The newest step.
        ranks: How many ranks have kept it.
        smaller: The smaller numbers of ranks that the script's degrees allow, the largest first.
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
    """Returns what follows an attempt that failed, in a job that may go on with fewer ranks.

    Args:
        attempt: The attempt.
        verdict: How it ended.
        then: What follows if no place is given up.
        kept: Returns what the ranks have kept; None if no step.
        least: The smallest number of ranks.
        seconds: After how long a place is tried again.
    """
    rank, before, newest = verdict.place, attempt.width, kept()
    if newest is None:
        return then
    if verdict.permanent and before.places and newest.ranks != len(before.places):
        return _with_still_fewer(attempt, newest, then, least)
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


def _with_still_fewer(
    attempt: Attempt, newest: KeptRanks, then: End | Again, least: int
) -> End | Again:
    """Returns what follows where a script refuses the ranks that are left before their first step.

    Its layers may not divide by so many stages.
    """
    refused = len(attempt.width.places)
    fewer = newest.fewer(refused)
    if fewer < least:
        return then
    width = attempt.width.with_fewer(fewer)
    return _goes_on(attempt, f"the script refuses {refused} ranks", newest.step, width, then)


def _goes_on(attempt: Attempt, why: str, step: int, width: Width, then: End | Again) -> Again:
    count = "1 rank" if width.left == 1 else f"{width.left} ranks"
    said = f"{why}: the job goes on after {step} steps, from memory, with {count} of {width.whole}"
    return Again(Attempt(attempt.number + 1, width=width), (then.said[0], said))


def with_all(attempt: Attempt, step: int) -> Again:
    """Returns the attempt in which places that were given up have a rank again."""
    width = attempt.width.with_all(step)
    said = f"after {step} steps the job goes on with all {width.whole} ranks again"
    return Again(Attempt(attempt.number + 1, attempt.restarts, width=width), (said,))


def with_as_many(attempt: Attempt, then: End | Again) -> Again:
    """Returns the attempt that follows where ranks failed as they ended for the sake of all.

    A disk may be full: with what they keep in memory they go on, and are asked again later.
    """
    width = attempt.width._replace(seconds=2 * attempt.width.seconds)
    said = f"as many ranks go on, and all of them are tried after {width.seconds:g} s"
    following = Attempt(attempt.number + 1, attempt.restarts, width=width)
    return Again(following, (then.said[0], said))


def _is_lost(attempt: Attempt, verdict: Verdict, rank: int, then: End | Again) -> bool:
    """Whether the place of the rank that failed first is given up."""
    width, before = attempt.width, attempt.failed
    if width.places and verdict.step is not None and verdict.step == width.since:
        return False  # the step fails on other places too
    ends = isinstance(then, End)
    if before is None:
        return ends
    if before.place == rank or rank in before.died:  # two places may break at once
        return ends or verdict.step in (None, before.step)
    return ends and not verdict.repeats(before)
