"""Decides when a job goes on with fewer ranks: no process and no clock.

A place is given up when its rank has failed twice without a step between, or once after it was
tried again. What a script does wrong in a step fails on any place, and ends the job as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fleetpipe.launch.supervisor.attempts import Again, Attempt, End, Verdict


class KeptRanks(NamedTuple):
    """What the ranks have kept in memory.

    Attributes:
        step: The newest step.
        ranks: How many ranks there are.
        fewer: The largest smaller number of ranks that the script takes; 0 for none.
    """

    step: int
    ranks: int
    fewer: int


def with_fewer(
    attempt: Attempt,
    verdict: Verdict,
    then: End | Again,
    kept: Callable[[int], KeptRanks | None],
    least: int,
    seconds: float,
) -> End | Again:
    """Returns what follows an attempt that failed, in a job that may go on with fewer ranks.

    Args:
        attempt: The attempt.
        verdict: How it ended.
        then: What follows if no place is given up.
        kept: Returns what so many ranks have kept; given 0, what those of the newest step have.
        least: The smallest number of ranks.
        seconds: After how long a place is tried again.
    """
    rank = verdict.place
    if rank is None or verdict.permanent or not _is_lost(attempt, verdict, rank, then):
        return then
    again = attempt.width.fails_trial(rank, verdict.step)
    newest = kept(attempt.width.left if again else attempt.width.ranks)
    if newest is None:
        return then
    step, ranks, fewer = newest
    if again:
        ranks, fewer = attempt.width.whole, attempt.width.left
    if fewer < least:
        why = f"--least {least} allows no fewer ranks" if fewer else "the script takes no fewer"
        return then._replace(said=(*then.said, f"rank {rank} is not given up: {why}"))
    width = attempt.width.without(rank, ranks, fewer, verdict.step, seconds)
    said = (
        f"rank {rank} is given up, and tried again after {width.seconds:g} s: the job goes on "
        f"after {step} steps, from memory, with {fewer} ranks of {width.whole}"
    )
    following = Attempt(attempt.number + 1, width=width)
    return Again(following, (then.said[0], said))


def with_all(attempt: Attempt, step: int) -> Again:
    """Returns the attempt in which places that were given up have a rank again."""
    width = attempt.width.with_all(step)
    said = f"after {step} steps the job goes on with all {width.whole} ranks again"
    return Again(Attempt(attempt.number + 1, attempt.restarts, width=width), (said,))


def _is_lost(attempt: Attempt, verdict: Verdict, rank: int, then: End | Again) -> bool:
    """Whether the place of the rank that failed first is given up."""
    width, before = attempt.width, attempt.failed
    if width.fails_trial(rank, verdict.step):
        return True
    if width.places and verdict.step is not None and verdict.step == width.since:
        return False  # the step fails on other places too
    ends = isinstance(then, End)
    if before is None:
        return ends
    if before.place == rank:
        return ends or verdict.step in (None, before.step)
    return ends and not verdict.repeats(before)
