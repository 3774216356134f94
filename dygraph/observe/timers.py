"""Times forwards, backwards, transfers and reductions for ``pp_configs.enable_timer``.

The timers have the names and calls of Fleet's, and wait for a GPU as Fleet's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fleetpipe import log
from fleetpipe.engine.observer import BatchObserver, Instruction, Played
from fleetpipe.engine.stopwatch import Stopwatch
from fleetpipe.errors import StateError
from fleetpipe.paddle_api.device import device_clock
from fleetpipe.schedules import Action, Op, Recv, Send

_log = log.logger(__name__)

_TRANSFERS = {"S": "send", "R": "recv"}
_WAYS = {"F": "forward", "B": "backward"}


class Timer:
    """Adds up the time between its starts and stops."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._elapsed = 0.0
        self._started: float | None = None
        self._clock = device_clock()

    @property
    def running(self) -> bool:
        """Whether it is started and not stopped."""
        return self._started is not None

    def start(self) -> None:
        """Starts the timer.

        Raises:
            StateError: The timer runs already.
        """
        if self.running:
            raise StateError(f"the timer {self.name} has been started already", fix="stop it first")
        self._started = self._clock()

    def stop(self) -> None:
        """Stops the timer.

        Raises:
            StateError: The timer does not run.
        """
        if self._started is None:
            raise StateError(f"the timer {self.name} has not been started", fix="start it first")
        self.add(self._clock() - self._started)
        self._started = None

    def add(self, seconds: float) -> None:
        """Adds time that was measured elsewhere."""
        self._elapsed += seconds

    def reset(self) -> None:
        """Stops, and sets the time to 0."""
        self._elapsed = 0.0
        self._started = None

    def elapsed(self, reset: bool = True) -> float:
        """Returns the seconds so far; a running timer continues."""
        running = self.running
        if running:
            self.stop()
        elapsed = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start()
        return elapsed


class Timers:
    """The timers of a wrapper, by name: ``timers("forward_step").elapsed()``.

    Attributes:
        timers: The timers that have been used.
    """

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Returns the timer of that name."""
        if name not in self.timers:
            self.timers[name] = Timer(name)
        return self.timers[name]

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Times the code that runs while it is open."""
        timer = self(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def log(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Writes the milliseconds of ``names`` to standard error, as one line."""
        texts = [
            f"{name}: {self.timers[name].elapsed(reset) * 1000.0 / normalizer:.2f}"
            for name in names
        ]
        _log.info(" | ".join(["time (ms)", *texts]))


class TimedActions(BatchObserver):
    """Times actions and the transfers between stages, and logs all timers after a batch."""

    in_evaluation = True

    def __init__(self, timers: Timers) -> None:
        self._timers, self._clock = timers, device_clock()

    def end(self) -> None:
        """Logs the times of the batch."""
        self._timers.log(self._timers.timers)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if isinstance(op, Action):
            name = "forward_step" if op.kind == "F" else "backward_step"
        elif isinstance(op, (Send, Recv)):
            name = f"{_TRANSFERS[op.letter]}_{_WAYS[op.kind]}"
        else:
            return instruction

        def add(begin: float, end: float) -> None:
            self._timers(name).add(end - begin)

        return Stopwatch(instruction, add, self._clock)
