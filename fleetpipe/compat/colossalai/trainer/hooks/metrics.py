"""What hooks count: each value that a log shows, the same on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Metric(ABC):
    """A value of the last step, and one of the epoch.

    Attributes:
        epoch_only: Whether the value of a step means little.
    """

    def __init__(self, epoch_only: bool) -> None:
        """Says whether it is one of whole epochs."""
        self.epoch_only = epoch_only

    @abstractmethod
    def reset(self) -> None:
        """Begins an epoch."""

    @abstractmethod
    def get_last_step_value(self) -> float:
        """Returns the value of the last step."""

    @abstractmethod
    def get_accumulated_value(self) -> float:
        """Returns the value of the epoch so far."""


class RatioMetric(Metric):
    """A sum over another one: a mean loss, right rows among all, samples a second."""

    def __init__(self, epoch_only: bool) -> None:
        """Begins with nothing."""
        super().__init__(epoch_only)
        self.reset()

    def reset(self) -> None:
        """Begins an epoch."""
        self._sum = self._count = 0.0
        self._last = 0.0

    def update(self, value: float, count: float = 1.0) -> None:
        """Counts a step.

        Args:
            value: Is added up.
            count: What it is divided by, added up too.
        """
        self._sum += value
        self._count += count
        self._last = value / count if count else 0.0

    def get_last_step_value(self) -> float:
        """Returns the value of the last step; 0 before the first."""
        return self._last

    def get_accumulated_value(self) -> float:
        """Returns the value of the epoch so far; 0 before its first step."""
        return self._sum / self._count if self._count else 0.0

    def state_dict(self) -> dict[str, float]:
        """Returns what was counted so far."""
        return {"sum": self._sum, "count": self._count}

    def set_state_dict(self, state: dict[str, float]) -> None:
        """Goes on in the middle of an epoch."""
        self._sum, self._count = state["sum"], state["count"]


class LearningRateMetric(Metric):
    """The learning rate as it was last set."""

    def __init__(self, epoch_only: bool, initial_lr: float = 0.0) -> None:
        """Begins with a rate."""
        super().__init__(epoch_only)
        self._rate = initial_lr

    def reset(self) -> None:
        """Keeps the rate."""

    def update(self, lr: float) -> None:
        """Takes another."""
        self._rate = lr

    def get_last_step_value(self) -> float:
        """Returns it."""
        return self._rate

    def get_accumulated_value(self) -> float:
        """Returns it."""
        return self._rate
