"""Files that are, at any moment, the old ones or the new ones whole: one way for all that is saved.

They are written in a folder beside their place, synced, and renamed. A process that is killed on
the way leaves that folder; the next one that writes there removes it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetpipe import systems
from fleetpipe.checkpoint.files import commit

_DRAFT = re.compile(r"\.draft-(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{8}")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Gives an empty folder; the files that the body writes there replace those in ``folder``.

    Several are renamed one right after the other: between two renames a kill leaves some of both.

    Args:
        folder: Made where it does not exist.

    Raises:
        OSError: They cannot be written; the files that were there stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_left(folder)
    draft = folder / f".draft-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    draft.mkdir()
    try:
        yield draft
        files = sorted(draft.iterdir())
        for file in files:
            _sync(file)
        for file in files:
            file.replace(folder / file.name)
        commit.sync_folder(folder)
    finally:
        commit.remove_draft(draft)


def _sync(path: Path) -> None:
    with path.open("r+b") as file:  # Windows syncs no file that is open for reading alone
        os.fsync(file.fileno())


def _remove_left(folder: Path) -> None:
    """Removes the drafts of processes of this host that have ended."""
    for path in folder.iterdir():
        match = _DRAFT.fullmatch(path.name)
        if match is None or match["host"] != socket.gethostname():
            continue
        if not systems.is_running(int(match["process"])):
            shutil.rmtree(path, ignore_errors=True)
