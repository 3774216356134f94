"""A step's folder appears at once and whole: written as a draft, synced, then renamed.

``step-00000500`` is a step. A draft begins with a dot, ``.draft-00000500-<key>``, and is nothing to
a reader; what a step of the same number replaces is ``step-00000500.old`` while it is, and counts
as that step as long as there is no other. ``step-00000500.aside`` is no step of the run any more.
"""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

from fleetpipe import atomic_file, systems

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})(\.old)?")
_DRAFT, _ASIDE = ".draft-", ".aside"


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
    found: dict[int, Path] = {}
    # The one in place comes before the one it replaces.
    for path in sorted(home.iterdir() if home.is_dir() else ()):
        match = _STEP.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.setdefault(int(match[1]), path)
    return dict(sorted(found.items()))


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
        Where each is now. One of the same number that was there is removed.

    Raises:
        OSError: One cannot be renamed.
    """
    found = {}
    later = [pair for pair in complete_steps(home).items() if pair[0] > step]
    for number, path in reversed(later):
        final = folder_of(home, number)
        found[number] = final.with_name(f"{final.name}{_ASIDE}")
        remove(found[number])
        path.rename(found[number])
        remove(final.with_name(f"{final.name}.old"))
    return dict(reversed(found.items()))


def aside_steps(home: Path) -> dict[int, Path]:
    """Returns the folders that :func:`set_aside` has made, in ascending order."""
    found = {}
    for path in sorted(home.glob(f"step-*{_ASIDE}")):
        match = _STEP.fullmatch(path.name.removesuffix(_ASIDE))
        if match:
            found[int(match[1])] = path
    return found


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
