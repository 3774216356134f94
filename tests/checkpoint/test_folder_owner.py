"""A folder of checkpoints has one writer at a time: the process that says so in it, and lives."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from paddle import nn

import fleetpipe
from fleetpipe import systems
from fleetpipe.checkpoint.files.folder_owner import FolderOwner
from fleetpipe.errors import CheckpointError

REFUSED = "another job saves into this folder"


def forbid_writing(monkeypatch: pytest.MonkeyPatch, also_new: bool = False) -> None:
    """Lets files of this kind be read alone, as those of another user."""
    opened = systems.open_in_place

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_RDWR and (also_new or path.exists()):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags)

    monkeypatch.setattr(systems, "open_in_place", refuse)


def save(home: Path, step: int) -> fleetpipe.CheckpointManager:
    manager = fleetpipe.CheckpointManager(home)
    manager.save(step, model=nn.Linear(2, 2))
    return manager


def hold(home: Path, told: Connection) -> None:
    """Saves a step in a process of its own, which then waits for its end."""
    manager = save(home, 1)
    told.send(manager.steps())
    signal.pause()


@pytest.fixture
def holder(tmp_path: Path) -> Callable[[], int]:
    """Starts another process that is the writer of the test's folder, and returns its number."""

    def start() -> int:
        fork = multiprocessing.get_context("fork")
        told, tells = fork.Pipe(duplex=False)
        other = fork.Process(target=hold, args=(tmp_path, tells), daemon=True)
        other.start()
        assert 1 in told.recv()
        return other.pid or 0

    return start


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_a_living_writer_is_named_and_a_killed_one_is_followed(
    tmp_path: Path, holder: Callable[[], int]
) -> None:
    process = holder()
    named = rf"{REFUSED}(?s:.*)process {process} on \S+, since 20\d\d-"
    with pytest.raises(CheckpointError, match=named):
        save(tmp_path, 2)
    model, manager = nn.Linear(2, 2), fleetpipe.CheckpointManager(tmp_path)
    before = model.weight.numpy().tobytes()
    with pytest.raises(CheckpointError, match=named):
        fleetpipe.resume(model, manager=manager)
    assert model.weight.numpy().tobytes() == before
    # Whoever only reads is no writer.
    assert manager.restore(model=model).step == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".draft")]
    end(process)
    save(tmp_path, 2)
    assert manager.steps() == [1, 2]


def test_a_job_that_is_done_with_a_folder_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Callable[[], int]
) -> None:
    monkeypatch.setattr("fleetpipe.launch.resume.STOP_SIGNALS", {})
    with fleetpipe.CheckpointManager(tmp_path) as manager:
        for _ in fleetpipe.resume(nn.Linear(2, 2), manager=manager).steps(1):
            # Others of this process are the same writer.
            save(tmp_path, 0)
        assert not (tmp_path / ".writer").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000000", "step-00000001"]
    end(holder())


def test_without_locks_the_last_writer_of_another_host_is_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Callable[[], int]
) -> None:
    def none(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(systems, "lock", none)
    process = holder()
    with pytest.raises(CheckpointError, match=re.escape(f"process {process} on ")):
        save(tmp_path, 2)
    end(process)
    manager = save(tmp_path, 2)
    file = tmp_path / ".writer"
    elsewhere = {**json.loads(file.read_text()), "host": "elsewhere", "key": "another"}
    file.write_text(json.dumps(elsewhere))
    with pytest.raises(CheckpointError, match=f"{REFUSED}(?s:.*) on elsewhere, since"):
        manager.save(3, model=nn.Linear(2, 2))
    assert manager.steps() == [1, 2]
    manager.release()
    assert json.loads(file.read_text()) == elsewhere
    save(tmp_path, 3)


@pytest.mark.parametrize("kind", ["link", "second_name", "folder", "pipe", "socket"])
def test_what_is_no_file_of_a_writer_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    thesis, writer = tmp_path / "thesis.tex", tmp_path / "run" / ".writer"
    thesis.write_text("years of work\n")
    writer.parent.mkdir()
    if kind == "link":
        writer.symlink_to(thesis)
    elif kind == "second_name":
        writer.hardlink_to(thesis)
    elif kind == "folder":
        writer.mkdir()
    elif kind == "pipe":
        os.mkfifo(writer)
        forbid_writing(monkeypatch)  # and to read it would wait for who writes
    else:
        monkeypatch.chdir(writer.parent)
        socket.socket(socket.AF_UNIX).bind(writer.name)
    with pytest.raises(CheckpointError, match=r"(?s)names the writer.*\.writer.*remove it"):
        save(tmp_path / "run", 1)
    assert thesis.read_text() == "years of work\n"


def test_a_folder_that_cannot_be_written_to_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_writing(monkeypatch, also_new=True)
    with pytest.raises(CheckpointError, match=r"Permission denied: .*\.writer"):
        save(tmp_path, 1)


def test_a_copy_of_the_folder_and_a_fork_that_stays_leave_the_lock_as_it_is(
    tmp_path: Path, holder: Callable[[], int]
) -> None:
    manager = save(tmp_path / "mine", 1)
    shutil.copytree(tmp_path / "mine", tmp_path / "backup")
    other = multiprocessing.get_context("spawn").Process(target=save, args=(tmp_path / "mine", 2))
    other.start()
    other.join()
    assert other.exitcode == 1
    assert manager.steps() == [1]
    # As a worker of a loader that outlives the process that was killed.
    fork = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    fork.start()
    owner = FolderOwner.of(tmp_path / "mine")
    os.close(owner._lock.descriptor)
    owner._lock.process = 0
    beside = multiprocessing.get_context("spawn").Process(target=save, args=(tmp_path / "mine", 2))
    beside.start()
    beside.join()
    fork.kill()
    fork.join()
    assert beside.exitcode == 0
    assert manager.steps() == [1, 2]


def test_a_colleague_goes_on_where_another_user_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Callable[[], int]
) -> None:
    process = holder()
    forbid_writing(monkeypatch)
    with pytest.raises(CheckpointError, match=f"{REFUSED}(?s:.*)process {process} on "):
        save(tmp_path, 2)
    end(process)
    umask = os.umask(0o002)
    try:
        manager = save(tmp_path, 2)
        assert manager.steps() == [1, 2]
        # All of the group may write: 0666 but for the umask.
        files = (tmp_path / ".writer", *(tmp_path / "step-00000002").iterdir())
        assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o664"}
    finally:
        os.umask(umask)
