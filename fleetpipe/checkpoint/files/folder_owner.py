"""The one job that writes into a folder of checkpoints.

``.writer`` in the folder says which it is, and its process has a lock on that file. The lock ends
with the process, so what a dead one leaves is taken over, also from another user of the folder. A
fork closes its copy of the open file, or it would keep the lock. File systems that hosts share have
such locks as well, but for those that are mounted without: there the last one to come is the
writer, and the one before is refused at its next save, as the file has another text.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetpipe import systems
from fleetpipe.errors import CheckpointError

_FILE = ".writer"
_MOST_BYTES = 4096
#: How the text of a writer begins.
_BEGIN = b'{"host": '
#: What it is to open a link, a folder or a socket.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


@dataclass
class _Lock:
    """The file while this process has it open and, where that can be, locked; no fork of it has."""

    file: Path
    process: int = 0
    descriptor: int = -1
    text: bytes = b""

    @property
    def held(self) -> bool:
        """Whether this process has the file that is still in the folder."""
        return self.process == os.getpid() and _in_place(self.descriptor, self.file)

    def release(self) -> None:
        """Closes the file, and removes it if it is still this process's."""
        if self.process == os.getpid():
            with contextlib.suppress(OSError):
                if self.held and _read(self.descriptor) == self.text:
                    # Before the lock ends: then the file may be another's.
                    self.file.unlink()
            os.close(self.descriptor)
        self.process = 0


class FolderOwner:
    """The right of this process to write into a folder, which all its managers share."""

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._lock = _Lock(run_directory / _FILE)
        weakref.finalize(self, self._lock.release)

    @classmethod
    def of(cls, run_directory: Path) -> FolderOwner:
        """Returns the one object for a folder in this process."""
        return _owners.setdefault(run_directory.resolve(), cls(run_directory.resolve()))

    def acquire(self) -> None:
        """Makes this process the writer, or checks that it still is.

        Raises:
            CheckpointError: Another process is the writer, or something else has the file's name.
            OSError: The folder cannot be written to.
        """
        if self._lock.held:
            text = _read(self._lock.descriptor)
            if text != self._lock.text:
                raise self._refusal(text)
            return
        self.release()
        self._run_directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
        except PermissionError:
            if not os.path.lexists(self._lock.file):
                raise
            self._remove_of_other_user()
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
        try:
            self._lock_or_refuse(descriptor)
            mine = _description()
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, mine)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock.process, self._lock.descriptor, self._lock.text = os.getpid(), descriptor, mine

    def release(self) -> None:
        """Lets another process be the writer."""
        self._lock.release()

    def leave_to_parent(self) -> None:
        """Closes the file in a fork, whose copy would keep the lock when the writer has ended."""
        if self._lock.process:
            os.close(self._lock.descriptor)
            self._lock.process = 0

    def _open(self, flags: int) -> int:
        try:
            return systems.open_in_place(self._lock.file, flags)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise self._no_file_of_writer(str(error)) from None
            raise

    def _lock_or_refuse(self, descriptor: int) -> None:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        text = _read(descriptor) if regular else b""
        if not regular or (text and not text.startswith(_BEGIN)):
            raise self._no_file_of_writer(f"{text[:40]!r}" if regular else "no regular file")
        if not _try_lock(descriptor, text) or not _in_place(descriptor, self._lock.file):
            raise self._refusal(text)

    def _remove_of_other_user(self) -> None:
        """Removes a file that this user may only read, if its writer has ended."""
        descriptor = self._open(os.O_RDONLY)
        try:
            self._lock_or_refuse(descriptor)
            self._lock.file.unlink()
        finally:
            os.close(descriptor)

    def _no_file_of_writer(self, got: str) -> CheckpointError:
        return CheckpointError(
            "the file that names the writer of a folder of checkpoints is something else",
            where=str(self._lock.file),
            expected="no such file, or one that a job of fleetpipe's has left",
            got=got,
            fix="see what it is, and remove it",
            permanent=True,
        )

    def _refusal(self, text: bytes) -> CheckpointError:
        about = _parse(text)
        return CheckpointError(
            "another job saves into this folder of checkpoints",
            where=str(self._run_directory),
            expected="one writer at a time, as each sets the other's later steps aside",
            got="process {process} on {host}, since {since}".format_map(about)
            if about
            else "a process that has just begun",
            fix="wait until that job has ended, or end it; or give this one another folder "
            "(fleetpipe launch --checkpoint-dir)",
        )


_owners: weakref.WeakValueDictionary[Path, FolderOwner] = weakref.WeakValueDictionary()


def _leave_all_to_parent() -> None:
    for owner in [*_owners.values()]:
        owner.leave_to_parent()


systems.call_in_forked_child(_leave_all_to_parent)


def _read(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, _MOST_BYTES)


def _in_place(descriptor: int, file: Path) -> bool:
    """Whether a path still leads to the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.lstat())
    except FileNotFoundError:
        return False


def _description() -> bytes:
    about = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "key": os.urandom(8).hex(),
    }
    return json.dumps(about).encode()


def _parse(text: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        about = json.loads(text)
        if isinstance(about, dict) and {"process", "host", "since"} <= about.keys():
            return about
    return {}


def _try_lock(descriptor: int, text: bytes) -> bool:
    """Locks a file; where the file system has no locks, whether the process of ``text`` ended."""
    try:
        return not systems.HAS_LOCKS or systems.lock(descriptor, wait=False)
    except OSError:
        about = _parse(text)
        here = about.get("host") == socket.gethostname()
        return not (here and systems.is_running(int(about["process"])))
