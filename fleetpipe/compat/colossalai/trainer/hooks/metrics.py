"""What hooks count: each value that a log shows, the same on every rank."""

from __future__ import annotations


class Metric:
    """A sum over another one: a mean loss, right rows among all, samples a second.

    Attributes:
        epoch_only: Whether the value of a step means little.
    """

    def __init__(self, epoch_only: bool) -> None:
        """Begins with nothing."""
        self.epoch_only = epoch_only
        self.reset()

    def reset(self) -> None:
        """Begins an epoch."""
        self._sum = self._count = self._last = 0.0

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
        """Continues in the middle of an epoch."""
        self._sum, self._count = state["sum"], state["count"]
