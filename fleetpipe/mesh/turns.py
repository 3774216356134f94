"""Runs two computations of a rank in turns: one runs while the other exchanges with other ranks.

Each has a thread, and one runs at a time: it hands the turn over when it has begun an exchange with
other ranks and would wait for it. So the order, all bits and the order of messages depend on what
the two compute, not on timing.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from fleetpipe.errors import PipelineTimeout


class SideState(Protocol):
    """State of the process, such as random streams, that each computation must have for itself."""

    def suspend(self) -> Callable[[], None]:
        """Removes the computation's state from the process; returns a function that restores it."""

    def inherited(self) -> AbstractContextManager[object]:
        """Returns a context for another thread, with the modes that this thread has now."""


class _Side:
    """One of two computations.

    Attributes:
        other: The other computation.
        ended: Whether it has ended, by an error too.
        away: Seconds that it has waited for its turn since its first turn.
    """

    other: _Side

    def __init__(self, turns: Turns, errors: list[BaseException]) -> None:
        self.ended = False
        self.away = 0.0
        self._turns, self._errors = turns, errors
        self._turn = threading.Semaphore(0)
        self._begun = time.perf_counter()

    def run(self, computation: Callable[[], None]) -> None:
        """Runs a computation from its first turn on; stores its error."""
        here.side = self
        try:
            self._wait()
            self.away = 0.0
            computation()
        except BaseException as error:
            self._errors.append(error)
        finally:
            here.side = None
            self.ended = True
            self.other.give()

    def give(self) -> None:
        """Gives this side the turn."""
        self._turn.release()

    def hand_over(self) -> None:
        """Lets the other side run until it hands over or ends."""
        if self.other.ended:
            return
        resume = self._turns.state.suspend()
        self.other.give()
        try:
            self._wait()
        finally:
            resume()

    def _wait(self) -> None:
        since = time.perf_counter()
        if not self._turn.acquire(timeout=self._turns.limit):
            raise _stuck(self._turns.limit)
        self.away += time.perf_counter() - since
        if self._errors:
            raise _Abandoned

    def stretch(self, begin: float, end: float) -> tuple[float, float]:
        """The same as the function :func:`stretch`, for this side."""
        length = end - begin - self.away
        return (end - length, end) if self.other.ended else (self._begun, self._begun + length)


class _Abandoned(Exception):
    """Unwinds a computation because the other one has failed."""


class _Here(threading.local):
    """The state of a thread that runs a computation.

    Attributes:
        side: The computation that runs in the thread.
        helped: Seconds of processor time that another thread has spent for it.
        waited: Seconds that it has waited for the parts of exchanges.
        idle: Seconds that it has waited for the first of several messages, until it takes one.
        idled: The sum of all ``idle`` seconds.
    """

    side: _Side | None = None
    helped = 0.0
    waited = 0.0
    idle = 0.0
    idled = 0.0


here = _Here()


def hand_over() -> None:
    """Lets the other computation run, if there is one, while an exchange is under way.

    Raises:
        PipelineTimeout: The turn did not come back within the limit.
    """
    if here.side is not None:
        here.side.hand_over()


def stretch(begin: float, end: float) -> tuple[float, float]:
    """Returns the begin and end of an operation as if the two computations ran one by one.

    The arguments are when it really began and ended; the result leaves out the other's turns.
    """
    side = here.side
    return (begin, end) if side is None or not side.away else side.stretch(begin, end)


class Turns:
    """Runs pairs of computations.

    Attributes:
        state: The state that each computation has for itself.
        limit: Seconds that one may have to wait for its turn.
    """

    def __init__(self, state: SideState, timeout: float) -> None:
        """Creates the runner; its second thread starts with the first pair.

        Args:
            state: The state that each computation has for itself.
            timeout: Seconds that a wait for one message may last. A wait for the turn may last
                twice as long, since the other computation may wait for a message.
        """
        self.state, self.limit = state, 2 * timeout
        self._helper: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def run(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        """Runs two computations in turns, the second one in this thread.

        Afterwards random streams have the state that they have after ``first``.

        Raises:
            Exception: An error of one of them; the other one ends in its next exchange.
            PipelineTimeout: One of them did not go on within the limit.
        """
        errors: list[BaseException] = []
        first_side, second_side = _Side(self, errors), _Side(self, errors)
        first_side.other, second_side.other = second_side, first_side
        inherited, done = self.state.inherited(), threading.Event()
        at_begin = at_end = self.state.suspend()
        spent = 0.0

        def run_first() -> None:
            nonlocal at_end, spent
            since = time.thread_time()
            with inherited:
                first()
                at_end = self.state.suspend()
            spent = time.thread_time() - since

        def aside() -> None:
            first_side.run(run_first)
            done.set()

        def run_second() -> None:
            at_begin()
            second()

        self._threads().put(aside)
        first_side.give()
        second_side.run(run_second)
        if not done.wait(self.limit):
            raise _stuck(self.limit)
        here.helped += spent
        if errors:
            raise errors[0]
        at_end()

    def _threads(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        """Returns the queue of work for the other thread, which ends with this object."""
        if self._helper is None:
            self._helper = queue.SimpleQueue()
            serve = threading.Thread(
                target=_serve, args=(self._helper,), name="fleetpipe-turns", daemon=True
            )
            serve.start()
            weakref.finalize(self, self._helper.put, None)
        return self._helper


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := work.get()) is not None:
        run()
        del run


def _stuck(limit: float) -> PipelineTimeout:
    return PipelineTimeout(
        "a forward and a backward take turns, and one of them does not go on",
        expected=f"an exchange or its end within {limit:g} s",
        cause="a layer that computes for longer than that, or for ever",
        fix='raise fleetpipe_configs["timeout"], or set fleetpipe_configs["overlap"] = False',
    )
