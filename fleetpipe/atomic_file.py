"""Files that are, at any moment, the old ones or the new ones whole.

They are written as a draft beside their place and renamed. What is to survive a crash of the host
goes through :func:`replacing` or :func:`appearing`, which sync; the others survive the death of a
process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetpipe import systems

_DRAFT = re.compile(r"\.draft-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Gives an empty folder; the files that the body writes there replace those in ``folder``.

    They are synced first. Several are renamed one right after the other: between two renames a kill
    leaves some of both. A process that is killed leaves the draft; the next one removes it.

    Args:
        folder: Made where it does not exist.

    Raises:
        OSError: They cannot be written; the files that were there stay.
    """
    draft = _draft_folder(folder)
    try:
        yield draft
        files = sorted(draft.iterdir())
        for file in files:
            sync(file)
        for file in files:
            file.replace(folder / file.name)
        systems.sync_folder(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Gives an empty folder; when the body ends it is ``folder``, synced and whole.

    Args:
        folder: Does not exist, or is empty.

    Raises:
        OSError: It cannot be written, or there is such a folder; then nothing has changed.
    """
    draft = _draft_folder(folder.parent)
    try:
        yield draft
        for path in [*draft.rglob("*"), draft]:
            (systems.sync_folder if path.is_dir() else sync)(path)
        draft.rename(folder)
        systems.sync_folder(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def draft_of(file: Path) -> Iterator[Path]:
    """Gives a path for the body to write a file at, which then replaces ``file``; not synced.

    Raises:
        OSError: It cannot be written; a file that was there stays.
    """
    draft = _draft_name(file)
    try:
        yield draft
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def replace_text(file: Path, text: str) -> None:
    """Writes a file whole; not synced.

    Raises:
        OSError: It cannot be written; a file that was there stays.
    """
    with draft_of(file) as draft:
        draft.write_text(text, encoding="utf-8")


def write_once(file: Path, text: str) -> None:
    """Writes a file whole, or leaves the one that is there: of several writers the first one's."""
    draft = _draft_name(file)
    try:
        draft.write_text(text, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def sync(file: Path) -> None:
    """Waits until the contents of a file are on the disk."""
    with file.open("r+b") as opened:  # Windows syncs no file that is open for reading alone
        os.fsync(opened.fileno())


def _draft_folder(parent: Path) -> Path:
    """Makes a new draft in a folder, which is made where it is not."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_left(parent)
    draft = parent / f".draft-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    return draft


def _draft_name(file: Path) -> Path:
    return file.with_name(f".{file.name}.{uuid.uuid4().hex}")


def _remove_left(folder: Path) -> None:
    """Removes the drafts of processes of this host that have ended."""
    for path in folder.iterdir():
        match = _DRAFT.fullmatch(path.name)
        if match is None or match["host"] != socket.gethostname():
            continue
        if not systems.is_running(int(match["process"])):
            shutil.rmtree(path, ignore_errors=True)
