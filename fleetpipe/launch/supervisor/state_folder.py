"""The supervisor's folder in the host's memory, which outlives its ranks.

It holds a folder for each attempt. A lock shows that its supervisor lives: the next supervisor
removes the folder of one that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

#: A file system in memory, where the system has one.
_MEMORY = Path("/dev/shm")
_PREFIX = "fleetpipe-launch-"
_LOCK = "lock"


@contextmanager
def state_folder() -> Iterator[Path]:
    """Makes the folder, for this user alone, and removes it at the end."""
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*"):
        _remove_left_over(left)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
    folder = place / hidden.name[1:]
    import fcntl  # which Windows lacks, where the command says so itself

    try:
        with (hidden / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # type: ignore[attr-defined,unused-ignore]
            # Seen by others only now that it is locked.
            hidden.rename(folder)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_over(folder: Path) -> None:
    # It may be another user's, or be removed by another supervisor meanwhile.
    with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
        if _is_free(lock):
            shutil.rmtree(folder, ignore_errors=True)


def _is_free(lock: IO[str]) -> bool:
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined,unused-ignore]
    except BlockingIOError:
        return False
    return True
