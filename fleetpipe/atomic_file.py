"""Replaces files and folders at once: a reader sees the old or the new one, never a part.

Each is written under another name in the same folder, as a *draft*, and then renamed.
:func:`replacing` and :func:`appearing` sync, so that files survive a crash of the host; files of
the other functions survive the death of a process.
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

#: The name of a draft folder: it says which process of which host writes it.
_DRAFT = re.compile(r"\.draft-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder; the files that the body writes there replace those in ``folder``.

    All files are synced, then renamed one right after the other: a kill between two renames leaves
    new and old files. A killed process leaves the folder behind; the next call removes it.

    Args:
        folder: The folder of the files; it is made if it does not exist.

    Raises:
        OSError: The files cannot be written; the older ones stay.
    """
    with _draft_folder(folder) as draft:
        yield draft
        files = sorted(draft.iterdir())
        for file in files:
            sync(file)
        for file in files:
            file.replace(folder / file.name)
        systems.sync_folder(folder)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder, which is synced and renamed to ``folder`` when the body ends.

    Args:
        folder: The folder to make; it must not exist, or must be empty.

    Raises:
        OSError: The folder cannot be written, or exists; then nothing has changed.
    """
    with _draft_folder(folder.parent) as draft:
        yield draft
        for path in [*draft.rglob("*"), draft]:
            (systems.sync_folder if path.is_dir() else sync)(path)
        draft.rename(folder)
        systems.sync_folder(folder.parent)


@contextmanager
def draft_of(file: Path) -> Iterator[Path]:
    """Yields a path at which the body writes a file, which then replaces ``file`` without a sync.

    Raises:
        OSError: The file cannot be written; an older one stays.
    """
    draft = _draft_path(file)
    try:
        yield draft
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def replace_text(file: Path, text: str) -> None:
    """Replaces a file by one with ``text`` at once, without a sync.

    Raises:
        OSError: The file cannot be written; an older one stays.
    """
    with draft_of(file) as draft:
        draft.write_text(text, encoding="utf-8")


def write_once(file: Path, text: str) -> None:
    """Writes a text to a file at once, unless the file exists: of several writers the first wins.

    Raises:
        OSError: The file cannot be written.
    """
    draft = _draft_path(file)
    try:
        draft.write_text(text, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def sync(file: Path) -> None:
    """Waits until the contents of a file are on the disk."""
    with file.open("r+b") as opened:  # Windows cannot sync a file that is open only for reading
        os.fsync(opened.fileno())


@contextmanager
def _draft_folder(parent: Path) -> Iterator[Path]:
    """Yields a new draft folder in ``parent``, which is made if missing; removes it at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned_drafts(parent)
    draft = parent / f".draft-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _draft_path(file: Path) -> Path:
    """Returns a path for the new contents of a file: hidden, unique, in the file's folder."""
    return file.with_name(f".{file.name}.{uuid.uuid4().hex}")


def _remove_abandoned_drafts(folder: Path) -> None:
    """Removes the draft folders that ended processes of this host have left in a folder."""
    for path in folder.iterdir():
        match = _DRAFT.fullmatch(path.name)
        of_this_host = match is not None and match["host"] == socket.gethostname()
        if match and of_this_host and not systems.is_running(int(match["process"])):
            shutil.rmtree(path, ignore_errors=True)
