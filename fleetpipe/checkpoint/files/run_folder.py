"""Manages the folder of a run: one job writes there, publishes complete steps, removes old ones.

A step is written as a draft, synced, then renamed. ``step-00000500`` is a step. Readers ignore a
draft, ``.draft-00000500-<key>``. ``.writer`` names the job that writes, whose process has a lock on
that file. ``FolderOwner`` takes the lock, ``publish`` renames a draft, ``Retention`` removes steps.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import socket
import stat
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from fleetpipe import atomic_file, log, systems
from fleetpipe.checkpoint.files import manifest
from fleetpipe.errors import CheckpointError, ConfigError, require_whole

_WRITER_FILE = ".writer"
#: The most bytes of a file ``.writer`` that are read.
_MOST_BYTES = 4096
#: The first bytes of a file ``.writer``.
_WRITER_PREFIX = b'{"host": '
#: The errors of opening a link, a folder or a socket.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)

#: The owner of each folder of a run that this process uses, by the resolved path.
_owner_of_folder: weakref.WeakValueDictionary[Path, FolderOwner] = weakref.WeakValueDictionary()

_log = log.logger(__name__)

#: What a user may give in the place of a step's number; see :meth:`Retention.step_folder`.
LATEST, BEST = "latest", "best"
_MODES = ("min", "max")
#: The folder of a step; ``.old`` is the one that :func:`publish` replaces, until it is removed.
_STEP = re.compile(r"step-(\d{8,})(\.old)?")
_DRAFT, _ASIDE = ".draft-", ".aside"
#: The folder of a step that :func:`set_aside` renamed.
_SET_ASIDE = re.compile(rf"step-(\d{{8,}}){re.escape(_ASIDE)}(-\d+)?")


@dataclass
class _Lock:
    """The file ``.writer``, open and locked by this process if it is the writer of the folder.

    Attributes:
        file: The path of the file.
        process: The id of the process that has opened it; 0 for none. In a fork it is the parent.
        descriptor: The descriptor of the open file.
        text: The text that this process has written into it.
    """

    file: Path
    process: int = 0
    descriptor: int = -1
    text: bytes = b""

    @property
    def is_open(self) -> bool:
        """Whether this process has the file open, and the folder still has the same file."""
        return self.process == os.getpid() and _is_current_file(self.descriptor, self.file)

    def release(self) -> None:
        """Closes the file, and removes it if this process has written it last."""
        if self.process == os.getpid():
            with contextlib.suppress(OSError):
                if self.is_open and _read_writer(self.descriptor) == self.text:
                    # Before the lock ends, after which it may be another job's file.
                    self.file.unlink()
            os.close(self.descriptor)
        self.process = 0


class FolderOwner:
    """The right to write into the folder of a run, of which one process at a time has it.

    All checkpoint managers of this process share the object; see :meth:`for_folder`.
    """

    def __init__(self, run_directory: Path) -> None:
        self._run_directory = run_directory
        self._lock = _Lock(run_directory / _WRITER_FILE)
        weakref.finalize(self, self._lock.release)

    @classmethod
    def for_folder(cls, run_directory: Path) -> FolderOwner:
        """Returns this process's only object for a folder."""
        return _owner_of_folder.setdefault(run_directory.resolve(), cls(run_directory.resolve()))

    def acquire(self) -> None:
        """Makes this process the writer of the folder, or checks that it still is.

        Raises:
            CheckpointError: Another process is the writer, or something else has the file's name.
            OSError: The folder cannot be written to.
        """
        if self._lock.is_open:
            text = _read_writer(self._lock.descriptor)
            if text != self._lock.text:
                raise self._other_writer_error(text)
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
            text = _describe_process()
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, text)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock.process, self._lock.descriptor, self._lock.text = os.getpid(), descriptor, text

    def release(self) -> None:
        """Lets another process be the writer of the folder."""
        self._lock.release()

    def leave_to_parent(self) -> None:
        """Closes the file in a fork, so that the fork does not keep the lock of its parent."""
        if self._lock.process:
            os.close(self._lock.descriptor)
            self._lock.process = 0

    def _open(self, flags: int) -> int:
        """Opens the file ``.writer``, and returns its descriptor.

        Raises:
            CheckpointError: A link, a folder or a socket has this name.
            OSError: The file cannot be opened.
        """
        try:
            return systems.open_in_place(self._lock.file, flags)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise self._foreign_file_error(str(error)) from None
            raise

    def _lock_or_refuse(self, descriptor: int) -> None:
        """Locks the open file ``.writer``, which makes this process the writer of the folder.

        Raises:
            CheckpointError: Another job has locked it, or no job has written it.
        """
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        text = _read_writer(descriptor) if is_regular else b""
        if not is_regular:
            raise self._foreign_file_error("no regular file")
        if text and not text.startswith(_WRITER_PREFIX):
            raise self._foreign_file_error(f"{text[:40]!r}")
        if not _try_lock(descriptor, text) or not _is_current_file(descriptor, self._lock.file):
            raise self._other_writer_error(text)

    def _remove_of_other_user(self) -> None:
        """Removes another user's file ``.writer``, if the job that wrote it has ended."""
        descriptor = self._open(os.O_RDONLY)
        try:
            self._lock_or_refuse(descriptor)
            self._lock.file.unlink()
        finally:
            os.close(descriptor)

    def _foreign_file_error(self, got: str) -> CheckpointError:
        """Returns the error for a file ``.writer`` that no job has written, but is ``got``."""
        return CheckpointError(
            "the file that names the writer of a folder of checkpoints is something else",
            where=str(self._lock.file),
            expected="no such file, or one that a job of fleetpipe's has left",
            got=got,
            fix="see what it is, and remove it",
            permanent=True,
        )

    def _other_writer_error(self, text: bytes) -> CheckpointError:
        """Returns the error for a folder whose file ``.writer`` another job wrote as ``text``."""
        writer = _parse_writer(text)
        return CheckpointError(
            "another job saves into this folder of checkpoints",
            where=str(self._run_directory),
            expected="one writer at a time, as each sets the other's later steps aside",
            got="process {process} on {host}, since {since}".format_map(writer)
            if writer
            else "a process that has just begun",
            fix="wait until that job has ended, or end it; or give this one another folder "
            "(fleetpipe launch --checkpoint-dir)",
        )


def _leave_locks_to_parent() -> None:
    """Closes all locked files in a fork, so that the fork does not keep its parent's locks."""
    for owner in [*_owner_of_folder.values()]:
        owner.leave_to_parent()


systems.call_in_forked_child(_leave_locks_to_parent)


def _read_writer(descriptor: int) -> bytes:
    """Returns the text of the open file ``.writer``."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, _MOST_BYTES)


def _is_current_file(descriptor: int, file: Path) -> bool:
    """Returns whether a path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.lstat())
    except FileNotFoundError:
        return False


def _describe_process() -> bytes:
    """Returns the text by which this process names itself in the file ``.writer``."""
    description = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "key": os.urandom(8).hex(),
    }
    return json.dumps(description).encode()


def _parse_writer(text: bytes) -> dict[str, Any]:
    """Parses the text of a file ``.writer``; returns an empty dict for any other text."""
    with contextlib.suppress(ValueError):
        writer = json.loads(text)
        if isinstance(writer, dict) and {"process", "host", "since"} <= writer.keys():
            return writer
    return {}


def _try_lock(descriptor: int, text: bytes) -> bool:
    """Locks an open file ``.writer``, and returns whether this process may write the folder.

    On a file system without locks it may, unless the process named in ``text`` still runs here.
    """
    try:
        return not systems.HAS_LOCKS or systems.lock(descriptor, wait=False)
    except OSError:
        writer = _parse_writer(text)
        is_here = writer.get("host") == socket.gethostname()
        return not (is_here and systems.is_running(int(writer["process"])))


def folder_of(run_directory: Path, step: int) -> Path:
    """Returns the path of a step's folder."""
    return run_directory / f"step-{step:08d}"


def draft_of(run_directory: Path, step: int, key: str) -> Path:
    """Returns the path of the folder in which an attempt, named by ``key``, writes a step."""
    return run_directory / f"{_DRAFT}{step:08d}-{key}"


def complete_steps(run_directory: Path) -> dict[int, Path]:
    """Returns the folders of the complete steps of a run, in ascending order.

    Raises:
        OSError: The folder cannot be read.
    """
    folders: dict[int, Path] = {}
    # A step comes before the ``.old`` one that it replaces.
    for path in sorted(run_directory.iterdir() if run_directory.is_dir() else ()):
        match = _STEP.fullmatch(path.name)
        if match and (path / manifest.MANIFEST).is_file():
            folders.setdefault(int(match[1]), path)
        elif match and path.is_dir():
            text = f"{path} has no {manifest.MANIFEST} any more: that step is passed over"
            log.once(_log.warning, text)
    return dict(sorted(folders.items()))


def is_checkpoint(path: Path) -> bool:
    """Returns whether a folder is that of a step, or of a run with a complete step."""
    return (path / manifest.MANIFEST).is_file() or bool(complete_steps(path))


def find_step(path: Path, step: int | None = None) -> Path:
    """Returns the folder of a step, from a path that a user gave.

    Args:
        path: The folder of a run, or of a step.
        step: The number of the step; None is ``path`` itself if it is a step, else the newest one.

    Raises:
        CheckpointError: There is no such step.
    """
    if step is None and (path / manifest.MANIFEST).is_file():
        return path
    return Retention(path).step_folder(LATEST if step is None else step)


def publish(draft: Path, run_directory: Path, step: int) -> None:
    """Renames a draft, the folder of a step that is now written, to the name of a complete step.

    An older step with the same number is removed.

    Raises:
        OSError: The draft cannot be renamed; the draft and earlier steps are unchanged.
    """
    systems.sync_folder(draft)
    final = folder_of(run_directory, step)
    replaced = final.with_name(f"{final.name}.old")
    if os.path.lexists(final):
        remove(replaced)
        final.rename(replaced)
    draft.rename(final)
    systems.sync_folder(run_directory)
    remove(replaced)


def set_aside(run_directory: Path, step: int) -> dict[int, Path]:
    """Renames the folders of the steps after ``step``, since the run went back to it.

    ``step-00000500`` becomes ``step-00000500.aside``, which is no step any more; if that name is
    taken, ``step-00000500.aside-2`` or the next free one.

    Returns:
        The new folder of each renamed step, by number, in ascending order.

    Raises:
        OSError: A folder cannot be renamed.
    """
    moved = {}
    steps = complete_steps(run_directory)
    later = {number: path for number, path in steps.items() if number > step}
    # The newest step first: an interruption leaves all steps up to some number, without a gap.
    for number, path in reversed(later.items()):
        final = folder_of(run_directory, number)
        endings = chain([_ASIDE], (f"{_ASIDE}-{turn}" for turn in count(2)))
        names = (final.with_name(final.name + ending) for ending in endings)
        moved[number] = next(name for name in names if not name.exists())
        path.rename(moved[number])
        # Else the step that this one replaced would count as the step of this number again.
        remove(final.with_name(f"{final.name}.old"))
    return dict(reversed(moved.items()))


def aside_steps(run_directory: Path) -> list[tuple[int, Path]]:
    """Returns the number and folder of each step that :func:`set_aside` renamed, ascending."""
    matches = [(_SET_ASIDE.fullmatch(path.name), path) for path in sorted(run_directory.iterdir())]
    return [(int(match[1]), path) for match, path in matches if match]


def remove_step(run_directory: Path, step: int) -> None:
    """Removes a complete step, and before it the older step that it replaced.

    Raises:
        OSError: A folder cannot be removed.
    """
    final = folder_of(run_directory, step)
    remove(final.with_name(f"{final.name}.old"))
    remove(final)


def remove(path: Path) -> None:
    """Removes the folder of a step or a link to one, if it exists.

    The folder is first renamed to a draft, so that an interrupted removal leaves no half of a step.

    Raises:
        OSError: The folder cannot be renamed.
    """
    if os.path.lexists(path):
        draft = path.with_name(f"{_DRAFT}{path.name}-{uuid.uuid4().hex[:8]}")
        path.rename(draft)
        remove_left(draft)


def remove_drafts(run_directory: Path) -> None:
    """Removes the drafts that earlier attempts to save have left in the folder of a run."""
    for path in run_directory.iterdir():
        if path.name.startswith(_DRAFT):
            remove_left(path)


def remove_left(path: Path) -> None:
    """Removes a draft of a step, or a link; logs a warning if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass  # it was published before the failure
    except OSError as error:
        log.once(_log.warning, f"{path}, which nothing reads, cannot be removed: {error}", True)


def write_file(path: Path, text: str) -> None:
    """Writes a file, and waits until it is on the disk.

    Raises:
        OSError: The file cannot be written.
    """
    path.write_bytes(text.encode())
    atomic_file.sync(path)


@dataclass
class Retention:
    """The folder of a run, and the rule by which steps are kept.

    Args:
        run_directory: The folder of the run.
        max_to_keep: How many of the newest steps are kept; None keeps all.
        best: A metric and ``"min"`` or ``"max"``: the step with the best value is kept as well.

    Raises:
        ConfigError: ``max_to_keep`` is below 1, or ``best`` is no such pair.
    """

    run_directory: Path
    max_to_keep: int | None = None
    best: tuple[str, str] | None = None
    #: The metrics of steps, by number and modification time (ns) of the step's manifest.
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

    def require_metric(self, metrics: Mapping[str, float] | None) -> None:
        """Raises a ``ConfigError`` if the metrics of a step lack the metric of ``best``."""
        if self.best is not None and self.best[0] not in (metrics or {}):
            raise ConfigError(
                f"best={self.best!r} needs the metric {self.best[0]!r} with each step",
                got=", ".join(metrics or {}) or "no metrics",
                fix=f"save(step, .., metrics={{{self.best[0]!r}: ..}})",
            )

    def best_step(self) -> int | None:
        """Returns the number of the best complete step; None if no step has the metric.

        Of steps with equal values the newest is the best. A step with a NaN never is.
        """
        if self.best is None:
            return None
        name, mode = self.best
        sign = -1 if mode == "min" else 1  # so that the largest is the best
        steps = complete_steps(self.run_directory)
        values = {step: self._metrics_of(step, path).get(name) for step, path in steps.items()}
        rated = [
            (sign * value, step)
            for step, value in values.items()
            if value is not None and not math.isnan(value)
        ]
        _, best = max(rated, default=(0.0, None))
        return best

    def step_folder(self, step: int | str) -> Path:
        """Returns the folder of a complete step.

        Args:
            step: A number, ``"latest"`` or ``"best"``.

        Raises:
            CheckpointError: There is no such step.
        """
        steps = complete_steps(self.run_directory)
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
                where=str(self.run_directory),
                got=f"steps {[*steps]}" if steps else "no complete step",
                fix=f"this is one step: give the folder of the run, {self.run_directory.parent}"
                if (self.run_directory / manifest.MANIFEST).is_file()
                else "begin without restoring, or check the folder; fleetpipe.load_checkpoint "
                "loads what other programs have saved",
            )
        return steps[number]

    def remove_old_steps(self) -> None:
        """Removes the saved steps that ``max_to_keep`` and ``best`` do not keep.

        Raises:
            OSError: A step cannot be removed.
        """
        if self.max_to_keep is None:
            return
        steps = complete_steps(self.run_directory)
        kept_steps = {*[*steps][-self.max_to_keep :], self.best_step()}
        for step in steps:
            if step not in kept_steps:
                remove_step(self.run_directory, step)

    def _metrics_of(self, step: int, path: Path) -> Mapping[str, float]:
        """Returns the metrics of a step, read once from its folder; empty if that fails."""
        try:
            key = (step, (path / manifest.MANIFEST).stat().st_mtime_ns)
            if key not in self._metrics:
                self._metrics[key] = manifest.read_manifest(path).metrics
        except (OSError, CheckpointError):
            return {}
        return self._metrics[key]
