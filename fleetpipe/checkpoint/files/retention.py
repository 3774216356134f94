"""Which steps of a run are kept: the newest ones, and the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleetpipe.checkpoint.files import commit, manifest
from fleetpipe.errors import CheckpointError, ConfigError

LATEST, BEST = "latest", "best"
_MODES = ("min", "max")


@dataclass
class Retention:
    """The rule of a run.

    Args:
        home: The folder of the run.
        max_to_keep: How many of the newest steps are kept; None keeps all.
        best: A metric and ``"min"`` or ``"max"``: the best step by it is kept besides.

    Raises:
        ConfigError: A number below 1, or another word.
    """

    home: Path
    max_to_keep: int | None = None
    best: tuple[str, str] | None = None
    _metrics: dict[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_to_keep is not None and self.max_to_keep < 1:
            raise ConfigError(
                f"max_to_keep must be at least 1, or None (={self.max_to_keep})",
                fix="max_to_keep=None keeps all steps",
            )
        if self.best is not None and (len(self.best) != 2 or self.best[1] not in _MODES):
            raise ConfigError(
                f"best is a metric and how to compare it (={self.best!r})",
                expected='as in best=("loss", "min"), or "max"',
                fix='pass best=("loss", "min")',
            )

    def require(self, metrics: Mapping[str, float] | None) -> None:
        """Makes sure that a step that is saved can be compared with others.

        Raises:
            ConfigError: The metric is not there.
        """
        if self.best is not None and self.best[0] not in (metrics or {}):
            raise ConfigError(
                f"best={self.best!r} needs the metric {self.best[0]!r} with each step",
                got=", ".join(metrics or {}) or "no metrics",
                fix=f"save(step, .., metrics={{{self.best[0]!r}: ..}})",
            )

    def best_step(self) -> int | None:
        """Returns the best complete step, the newest of equals; None where none has the metric.

        What is not a number is not the best of anything.
        """
        if self.best is None:
            return None
        name, mode = self.best
        sign = -1 if mode == "min" else 1
        steps = commit.complete_steps(self.home)
        found = {step: self._metrics_of(step, path).get(name) for step, path in steps.items()}
        rated = [
            (sign * value, step)
            for step, value in found.items()
            if value is not None and not math.isnan(value)
        ]
        return max(rated)[1] if rated else None

    def chosen(self, step: int | str) -> Path:
        """Returns the folder of a complete step.

        Args:
            step: A number, ``"latest"`` or ``"best"``.

        Raises:
            CheckpointError: There is none.
        """
        steps = commit.complete_steps(self.home)
        number: int | str | None = step
        if step == LATEST and steps:
            number = [*steps][-1]
        if step == BEST:
            number = self.best_step()
        if not isinstance(number, int) or number not in steps:
            raise CheckpointError(
                f"there is no checkpoint of step {step!r}"
                if steps
                else "there is no checkpoint in this folder",
                where=str(self.home),
                got=f"steps {[*steps]}" if steps else "no complete step",
                fix="begin without restoring, or check the folder",
            )
        return steps[number]

    def apply(self) -> None:
        """Removes what is not to be kept.

        Raises:
            OSError: It cannot be removed.
        """
        if self.max_to_keep is None:
            return
        steps = commit.complete_steps(self.home)
        kept = {*[*steps][-self.max_to_keep :], self.best_step()}
        for step in steps:
            if step not in kept:
                commit.remove_step(self.home, step)

    def _metrics_of(self, step: int, path: Path) -> Mapping[str, float]:
        """Returns a step's metrics; of one that cannot be read, none."""
        try:
            written = (step, (path / commit.MANIFEST).stat().st_mtime_ns)
            if written not in self._metrics:
                self._metrics[written] = manifest.read(path).metrics
        except (OSError, CheckpointError):
            return {}
        return self._metrics[written]
