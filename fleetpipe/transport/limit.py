"""Limits of waits, which do not count time in which the process was stopped; waits at a store.

After a process was stopped (by a debugger, or a batch system that suspends a whole job), its clock
says that everybody else is overdue. That proves nothing: the others may not have run either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping

from fleetpipe.errors import FleetPipeError
from fleetpipe.transport.base import Store

#: A wait looks at its limit at least this often, in seconds.
LOOK_SECONDS = 0.5
#: A wait that did not look for so long was stopped; asking a store may take 2 s of them.
STOPPED_SECONDS = 5.0
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02


class Limit:
    """The seconds that a wait may last; they start again if the process did not run.

    The wait asks at least every ``LOOK_SECONDS``. If it asks much later, the process was stopped or
    had other work.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen = time.monotonic()
        self._end = self._seen + seconds

    def left(self) -> float:
        """Returns the seconds that are left; 0 or less if the limit is reached."""
        now = time.monotonic()
        if now - self._seen > STOPPED_SECONDS:
            self._end = now + self._seconds
        self._seen = now
        return self._end - now

    def reached(self) -> bool:
        """Whether no time is left."""
        return self.left() <= 0

    def nap(self) -> float:
        """Returns how long the wait may sleep before it looks again."""
        return max(0.0, min(self.left(), LOOK_SECONDS))


def await_keys(
    store: Store,
    keys: Mapping[int, str],
    limit: Limit,
    failure: Callable[[list[int], set[int]], FleetPipeError],
    gone: Callable[[], Collection[int]] = tuple,
    given_up: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Waits until each rank has added to its key; yields the ranks one after the other.

    Every wait for other ranks at a store goes through here: its ``get`` may block for ever. If no
    rank is late, each key is asked for once: a wait for many ranks polls only the first missing
    one.

    Args:
        store: The store. It may raise the error of a failed rank while somebody is missing.
        keys: The key of each rank that is waited for.
        limit: How long the wait may last.
        failure: Returns the error for the missing ranks and for those that have ended.
        gone: Returns the ranks that have ended.
        given_up: Whether another rank has reached its limit, which then ends this wait too.

    Raises:
        FleetPipeError: The error of ``failure``: the limit is reached, or a missing rank has ended.
    """
    waiting = sorted(keys)
    pause = _FIRST_PAUSE
    failed = False
    while waiting:
        # Asked before the store: whoever has ended by now either stands there or never will.
        ended = set(gone())
        try:
            while waiting and store.add(keys[waiting[0]], 0):
                yield waiting.pop(0)
            late = bool(waiting) and (limit.reached() or given_up())
        except FleetPipeError:
            # Whoever failed may have come since it was asked for, and have failed at what is next.
            if failed:
                raise
            failed = True
            continue
        if late or ended.intersection(waiting):
            missing = [rank for rank in waiting if not store.add(keys[rank], 0)]
            if missing and (late or ended.intersection(missing)):
                raise failure(missing, ended.intersection(missing))
        if waiting:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
