"""``MultiTimer``: named timers, each with its history."""

from __future__ import annotations

from collections.abc import Iterator

from fleetpipe.errors import StateError, nearest
from fleetpipe.paddle_api.device import device_clock


class Timer:
    """Measures times in seconds, one after another."""

    def __init__(self) -> None:
        self._history: list[float] = []
        self._begun: float | None = None
        self._elapsed = 0.0

    @property
    def has_history(self) -> bool:
        """Whether the history has a time."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """The current time in seconds, after the device has finished all its work."""
        return device_clock()()

    def start(self) -> None:
        """Begins to measure a time."""
        self._begun = self.current_time

    def stop(self, keep_in_history: bool = False) -> float:
        """Ends the measurement; returns its seconds.

        Args:
            keep_in_history: Whether the mean and the sum include it.

        Raises:
            StateError: The timer was not started.
        """
        if self._begun is None:
            raise StateError("this timer does not run", fix="call start() before stop()")
        self._elapsed = self.current_time - self._begun
        self._begun = None
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def reset(self) -> None:
        """Drops all times."""
        self._history, self._begun, self._elapsed = [], None, 0.0

    def get_elapsed_time(self) -> float:
        """Returns the time that was measured last; 0 if there is none."""
        return self._elapsed

    def get_history_sum(self) -> float:
        """Returns the sum of the times in the history."""
        return sum(self._history)

    def get_history_mean(self) -> float:
        """Returns the mean of the times in the history; 0 if there are none."""
        return self.get_history_sum() / max(len(self._history), 1)


class MultiTimer:
    """Timers by name; ``Trainer`` has ``Train-step``, ``Train-epoch``, ``Test-step`` and so on."""

    def __init__(self, on: bool = True) -> None:
        """Begins without any timers.

        Args:
            on: False makes all calls do nothing.
        """
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Starts the timer of a name, which may be new."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Stops a timer; returns the seconds, or None if timers are off.

        Raises:
            StateError: The timer was not started.
        """
        return self.get_timer(name).stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """Returns the timer of a name.

        Raises:
            StateError: There is no timer of that name.
        """
        if name not in self._timers:
            raise StateError(
                f"there is no timer {name!r}", fix=f"start it first; {nearest(name, self._timers)}"
            )
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Drops the times of one timer, or of all; does nothing if timers are off.

        Raises:
            StateError: There is no timer of that name.
        """
        if not self._on:
            return
        for timer in self._timers.values() if name is None else [self.get_timer(name)]:
            timer.reset()

    def is_on(self) -> bool:
        """Returns whether times are measured."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Switches all timers on or off."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())
