"""Replaces files and folders at once: a reader sees the old or the new one, never a part.

Each is written as a draft in the same folder and then renamed. :func:`replacing` and
:func:`appearing` sync, so that files survive a crash of the host; files of the other functions
survive the death of a process.
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
    """Yields an empty folder; the files that the body writes there replace those in ``folder``.

    They are synced first. Several files are renamed one right after the other: a kill between two
    renames leaves some of both. A process that is killed leaves its draft; the next one removes it.

    Args:
        folder: Is made if it does not exist.

    Raises:
        OSError: The files cannot be written; the older ones stay.
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
    """Yields an empty folder, which is synced and renamed to ``folder`` when the body ends.

    Args:
        folder: Must not exist, or be empty.

    Raises:
        OSError: The folder cannot be written, or exists; then nothing has changed.
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
    """Yields a path at which the body writes a file, which then replaces ``file``; not synced.

    Raises:
        OSError: The file cannot be written; an older one stays.
    """
    draft = _draft_name(file)
    try:
        yield draft
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def replace_text(file: Path, text: str) -> None:
    """Replaces a file by a text at once; not synced.

    Raises:
        OSError: The file cannot be written; an older one stays.
    """
    with draft_of(file) as draft:
        draft.write_text(text, encoding="utf-8")


def write_once(file: Path, text: str) -> None:
    """Writes a file at once, unless it exists: of several writers the first one wins."""
    draft = _draft_name(file)
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


def _draft_folder(parent: Path) -> Path:
    """Makes a new draft in a folder, and the folder itself if it is missing."""
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
