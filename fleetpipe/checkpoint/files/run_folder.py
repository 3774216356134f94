"""The folder of a run: its steps appear at once and whole, and some of them are kept.

A step is written as a draft, synced, then renamed.

``step-00000500`` is a step. A draft begins with a dot, ``.draft-00000500-<key>``, and is nothing to
a reader; what a step of the same number replaces is ``step-00000500.old`` while it is, and counts
as that step as long as there is no other. ``step-00000500.aside`` is no step of the run any more,
nor is ``step-00000500.aside-2``, which was set aside after it.
"""

from __future__ import annotations

import math
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from fleetpipe import atomic_file, systems
from fleetpipe.checkpoint.files import manifest
from fleetpipe.errors import CheckpointError, ConfigError, require_whole

LATEST, BEST = "latest", "best"
_MODES = ("min", "max")
_STEP = re.compile(r"step-(\d{8,})(\.old)?")
_DRAFT, _ASIDE = ".draft-", ".aside"
_SET_ASIDE = re.compile(rf"step-(\d{{8,}}){re.escape(_ASIDE)}(-\d+)?")


def folder_of(home: Path, step: int) -> Path:
    """Returns where a step of this number belongs in the folder of a run."""
    return home / f"step-{step:08d}"


def draft_of(home: Path, step: int, key: str) -> Path:
    """Returns where a step is written before it is whole; ``key`` keeps attempts apart."""
    return home / f"{_DRAFT}{step:08d}-{key}"


def complete_steps(home: Path) -> dict[int, Path]:
    """Returns the folders of the complete steps of a run, in ascending order.

    Raises:
        OSError: The folder cannot be read.
    """
    folders: dict[int, Path] = {}
    # The one in place comes before the one it replaces.
    for path in sorted(home.iterdir() if home.is_dir() else ()):
        match = _STEP.fullmatch(path.name)
        if match and (path / manifest.MANIFEST).is_file():
            folders.setdefault(int(match[1]), path)
    return dict(sorted(folders.items()))


def publish(draft: Path, home: Path, step: int) -> None:
    """Makes a draft, whose files are on the disk, the step. It replaces one of the same number.

    Raises:
        OSError: It cannot; the draft and earlier steps are as they were.
    """
    systems.sync_folder(draft)
    final = folder_of(home, step)
    replaced = final.with_name(f"{final.name}.old")
    if final.exists():
        remove(replaced)
        final.rename(replaced)
    draft.rename(final)
    systems.sync_folder(home)
    remove(replaced)


def set_aside(home: Path, step: int) -> dict[int, Path]:
    """Makes steps after ``step`` none of the run's: it went back, and goes on from there.

    Returns:
        Where each is now.

    Raises:
        OSError: One cannot be renamed.
    """
    moved = {}
    later = [pair for pair in complete_steps(home).items() if pair[0] > step]
    for number, path in reversed(later):
        final = folder_of(home, number)
        endings = chain([_ASIDE], (f"{_ASIDE}-{turn}" for turn in count(2)))
        names = (final.with_name(final.name + ending) for ending in endings)
        moved[number] = next(name for name in names if not name.exists())
        path.rename(moved[number])
        remove(final.with_name(f"{final.name}.old"))
    return dict(reversed(moved.items()))


def aside_steps(home: Path) -> list[tuple[int, Path]]:
    """Returns the steps that :func:`set_aside` has moved, in ascending order, and their folders."""
    matches = [(_SET_ASIDE.fullmatch(path.name), path) for path in sorted(home.iterdir())]
    return [(int(match[1]), path) for match, path in matches if match]


def remove_step(home: Path, step: int) -> None:
    """Removes a complete step, and what it has replaced before that.

    Raises:
        OSError: It cannot be removed.
    """
    final = folder_of(home, step)
    remove(final.with_name(f"{final.name}.old"))
    remove(final)


def remove(path: Path) -> None:
    """Removes a folder, if it is there; a crash on the way leaves a draft, and no half of a step.

    Raises:
        OSError: It cannot be removed.
    """
    if path.exists():
        draft = path.with_name(f"{_DRAFT}{path.name}-{uuid.uuid4().hex[:8]}")
        path.rename(draft)
        shutil.rmtree(draft)


def remove_drafts(home: Path) -> None:
    """Removes what writers that have ended left behind."""
    for path in home.iterdir():
        if path.name.startswith(_DRAFT):
            shutil.rmtree(path)


def remove_draft(draft: Path) -> None:
    """Removes a draft, as far as the file system lets it."""
    shutil.rmtree(draft, ignore_errors=True)


def write_file(path: Path, text: str) -> None:
    """Writes a file and waits until it is on the disk.

    Raises:
        OSError: It cannot be written.
    """
    path.write_bytes(text.encode())
    atomic_file.sync(path)


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
        if self.max_to_keep is not None:
            require_whole("max_to_keep", self.max_to_keep, fix="max_to_keep=None keeps all steps")
        if self.best is not None and (len(self.best) != 2 or self.best[1] not in _MODES):
            raise ConfigError(
                f"best is a metric and how to compare it (={self.best!r})",
                expected='as in best=("loss", "min"), or "max"',
                fix='pass best=("loss", "min")',
            )

    def require(self, metrics: Mapping[str, float] | None) -> None:
        """Makes sure that a step that is saved can be compared with others."""
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
        steps = complete_steps(self.home)
        values = {step: self._metrics_of(step, path).get(name) for step, path in steps.items()}
        rated = [
            (sign * value, step)
            for step, value in values.items()
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
        steps = complete_steps(self.home)
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
                fix="begin without restoring, or check the folder; fleetpipe.load_checkpoint loads "
                "what other programs have saved",
            )
        return steps[number]

    def apply(self) -> None:
        """Removes what is not to be kept.

        Raises:
            OSError: It cannot be removed.
        """
        if self.max_to_keep is None:
            return
        steps = complete_steps(self.home)
        kept = {*[*steps][-self.max_to_keep :], self.best_step()}
        for step in steps:
            if step not in kept:
                remove_step(self.home, step)

    def _metrics_of(self, step: int, path: Path) -> Mapping[str, float]:
        """Returns a step's metrics; of one that cannot be read, none."""
        try:
            written = (step, (path / manifest.MANIFEST).stat().st_mtime_ns)
            if written not in self._metrics:
                self._metrics[written] = manifest.read(path).metrics
        except (OSError, CheckpointError):
            return {}
        return self._metrics[written]
