"""The folder of a command that starts processes, and by which these end with it.

A lock in it shows that the command lives: the system frees it when the command ends, however that
happens. Each process that the command starts, and each that those start, waits for the lock, and
then ends. Those that are no ranks remove the folder; else the next command does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetpipe import systems

#: Names the folder of the command that started this process.
FOLDER = "FLEETPIPE_COMMAND_FOLDER"
#: A file system in memory, where the system has one.
_MEMORY = Path("/dev/shm")
_PREFIX = "fleetpipe-launch-"
_LOCK = "lock"


@contextmanager
def command_folder(large: bool = False) -> Iterator[Path]:
    """Makes the folder, for this user alone, and removes it at the end.

    The environment, which processes that are started meanwhile inherit, has its path.

    Args:
        large: Whether it may need much room: then it is in ``TMPDIR``, and not in the host's
            memory.
    """
    memory = not large and os.access(_MEMORY, os.W_OK)
    place = _MEMORY if memory else Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*"):
        _remove_left_over(left)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
    folder = place / hidden.name[1:]
    outer = os.environ.get(FOLDER)
    try:
        with (hidden / _LOCK).open("w") as lock:
            if not systems.lock(lock.fileno()):
                lock.close()  # Windows renames no folder with an open file
            # Seen by others only now that it is locked.
            hidden.rename(folder)
            os.environ[FOLDER] = str(folder)
            yield folder
    finally:
        os.environ.pop(FOLDER, None)
        if outer is not None:
            os.environ[FOLDER] = outer
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_over(folder: Path) -> None:
    # It may be another user's, or be removed by another command meanwhile.
    with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
        if systems.lock(lock.fileno(), wait=False):
            shutil.rmtree(folder, ignore_errors=True)


def end_with_command(first: Callable[[], None] = lambda: None) -> None:
    """Makes this process end with the command that started it, if it was started by one.

    A rank, which has a session of its own, ends with all processes in that.

    Args:
        first: Called before, and before the folder is removed.
    """
    if FOLDER in os.environ:
        folder = Path(os.environ[FOLDER])
        # Named, or the first thread of a script would not be the one that Python calls Thread-1.
        await_end = threading.Thread(
            target=_await_end, args=[folder, first], name="end with command", daemon=True
        )
        await_end.start()


def _await_end(folder: Path, first: Callable[[], None]) -> None:
    with contextlib.suppress(FileNotFoundError), (folder / _LOCK).open() as lock:
        if not systems.lock(lock.fileno(), shared=True):
            return
        if "PADDLE_TRAINER_ID" in os.environ:
            systems.end_session(os.getpid())
        else:
            # By the folder the launcher knows the ranks, of which one may hang and not end itself.
            first()
            shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), systems.SIGKILL)
