"""Runs two computations of a rank in turns: one runs while the other exchanges with other ranks.

Each computation has a thread, and one runs at a time: it hands the turn over when it has begun an
exchange with other ranks and would wait for it. So the order, all bits and the order of messages
depend on what the two compute, not on timing. The engine runs a fused forward and backward so.
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
    """State of the process, such as random streams, of which each computation needs its own."""

    def suspend(self) -> Callable[[], None]:
        """Takes the present state out of the process; returns a function that puts it back."""

    def inherited(self) -> AbstractContextManager[object]:
        """Returns a context that gives another thread the modes that this thread has now."""


class _Side:
    """One of two computations that take turns.

    Attributes:
        other: The other computation.
        ended: Whether this one has ended, in order or by an error.
        away: Seconds that it has waited for its turn since its first turn.
    """

    other: _Side

    def __init__(self, turns: Turns, errors: list[BaseException]) -> None:
        """Prepares a computation of ``turns``; its error is added to ``errors``."""
        self.ended = False
        self.away = 0.0
        self._turns, self._errors = turns, errors
        self._turn = threading.Semaphore(0)
        self._begun = time.perf_counter()

    def run(self, computation: Callable[[], None]) -> None:
        """Waits for the first turn, runs the computation, and gives the turn away at its end."""
        here.side = self
        try:
            self._wait_for_turn()
            self.away = 0.0
            computation()
        except BaseException as error:
            self._errors.append(error)
        finally:
            here.side = None
            self.ended = True
            self.other.give_turn()

    def give_turn(self) -> None:
        """Lets this computation run; the other one then waits."""
        self._turn.release()

    def hand_over(self) -> None:
        """Lets the other computation run until that hands over or ends."""
        if self.other.ended:
            return
        resume = self._turns.state.suspend()
        self.other.give_turn()
        try:
            self._wait_for_turn()
        finally:
            resume()

    def _wait_for_turn(self) -> None:
        """Waits until the other computation hands over.

        Raises:
            PipelineTimeout: The turn did not come within the limit.
            _Abandoned: The other computation has failed.
        """
        since = time.perf_counter()
        if not self._turn.acquire(timeout=self._turns.limit):
            raise _stuck_error(self._turns.limit)
        self.away += time.perf_counter() - since
        if self._errors:
            raise _Abandoned

    def without_other_turns(self, begin: float, end: float) -> tuple[float, float]:
        """Returns an operation's begin and end as if the other computation had had no turns."""
        length = end - begin - self.away
        return (end - length, end) if self.other.ended else (self._begun, self._begun + length)


class _Abandoned(Exception):
    """Unwinds a computation because the other one has failed."""


class _Here(threading.local):
    """What a thread knows of the computation that it runs.

    Attributes:
        side: The computation, if it takes turns with another one; else None.
        helped: Seconds of processor time that the other thread has spent on behalf of this one.
        waited: Seconds that this thread has waited for the parts of exchanges.
        idle: Seconds that it has now waited for the first of several messages; 0 once it takes one.
        idled: The sum of all ``idle`` seconds so far.
    """

    side: _Side | None = None
    helped = 0.0
    waited = 0.0
    idle = 0.0
    idled = 0.0


#: The state of the present thread.
here = _Here()


def hand_over() -> None:
    """Lets the other computation, if there is one, run while an exchange is under way.

    Raises:
        PipelineTimeout: The turn did not come back within the limit.
    """
    if here.side is not None:
        here.side.hand_over()


def without_other_turns(begin: float, end: float) -> tuple[float, float]:
    """Returns an operation's begin and end as if the two computations ran one after the other.

    Args:
        begin: When the operation really began, in seconds of ``time.perf_counter()``.
        end: When it really ended.

    Returns:
        Begin and end without the other computation's turns.
    """
    side = here.side
    return (begin, end) if side is None or not side.away else side.without_other_turns(begin, end)


class Turns:
    """Runs pairs of computations; the two of a pair take turns.

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
        restore_begin = restore_end = self.state.suspend()
        spent = 0.0

        def run_first() -> None:
            """Runs the first computation with this thread's modes; notes its processor time."""
            nonlocal restore_end, spent
            since = time.thread_time()
            with inherited:
                first()
                restore_end = self.state.suspend()
            spent = time.thread_time() - since

        def run_on_helper() -> None:
            """Runs the first computation in its turns; the second thread calls it."""
            first_side.run(run_first)
            done.set()

        def run_second() -> None:
            """Runs the second computation from the state before both."""
            restore_begin()
            second()

        self._helper_work().put(run_on_helper)
        first_side.give_turn()
        second_side.run(run_second)
        if not done.wait(self.limit):
            raise _stuck_error(self.limit)
        here.helped += spent
        if errors:
            raise errors[0]
        restore_end()

    def _helper_work(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        """Returns the queue of calls for the second thread, which ends with this object."""
        if self._helper is None:
            self._helper = queue.SimpleQueue()
            serve = threading.Thread(
                target=_run_all, args=(self._helper,), name="fleetpipe-turns", daemon=True
            )
            serve.start()
            weakref.finalize(self, self._helper.put, None)
        return self._helper


def _run_all(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Runs the calls of a queue one after another, until it gets None."""
    while (run := work.get()) is not None:
        run()
        del run  # or it would live until the next call


def _stuck_error(limit: float) -> PipelineTimeout:
    """Returns the error that a turn did not come within ``limit`` seconds."""
    return PipelineTimeout(
        "a forward and a backward take turns, and one of them does not go on",
        expected=f"an exchange or its end within {limit:g} s",
        cause="a layer that computes for longer than that, or for ever",
        fix='raise fleetpipe_configs["timeout"], or set fleetpipe_configs["overlap"] = False',
    )
