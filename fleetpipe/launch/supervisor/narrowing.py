"""Decides when a job goes on with fewer ranks: no process and no clock.

A place is given up when its rank has failed twice without a step between, or once after it was
tried again. What a script does wrong in a step fails on any place, and ends the job as always.
Where its model does not take the next smaller number of ranks, the one below is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fleetpipe.launch.supervisor.attempts import Again, Attempt, End, Verdict
from fleetpipe.launch.supervisor.width import Width


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
