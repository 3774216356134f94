"""A folder of checkpoints has one writer at a time: the process that says so in it, and lives."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from paddle import nn

import fleetpipe
from fleetpipe import systems
from fleetpipe.errors import CheckpointError

REFUSED = "another job saves into this folder"


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
    def none(_: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(systems, "lock_for_process", none)
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
