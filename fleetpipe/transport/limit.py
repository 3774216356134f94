"""The limit of a wait, in time that this process was there to see.

A process that is stopped (a debugger, a batch system that suspends a whole job) wakes to clocks on
which everybody else is long overdue. It is no witness of that: the others may not have run either.
"""

from __future__ import annotations

import time

#: A wait looks at its limit at least this often, in seconds.
LOOK_SECONDS = 0.5
#: A wait that did not look for so long was stopped; asking a store may take 2 s of them.
STOPPED_SECONDS = 5.0


class Limit:
    """Seconds that a wait may last; they begin anew where the process did not run.

    The wait asks at least every ``LOOK_SECONDS``. One that comes to it much later was stopped, or
    had other things to do than to wait.
    """

    def __init__(self, seconds: float) -> None:
        """Begins now."""
        self._seconds = seconds
        self._seen = time.monotonic()
        self._end = self._seen + seconds

    def left(self) -> float:
        """Returns the seconds that are left; 0 or less where the limit is reached."""
        now = time.monotonic()
        if now - self._seen > STOPPED_SECONDS:
            self._end = now + self._seconds
        self._seen = now
        return self._end - now

    def reached(self) -> bool:
        """Tells whether nothing is left."""
        return self.left() <= 0

    def nap(self) -> float:
        """Returns how long the wait may sleep before it looks again."""
        return max(0.0, min(self.left(), LOOK_SECONDS))
