"""The supervisor's folder in memory: its own while it lives, removed by the next one after."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fleetpipe.launch.supervisor import state_folder as rooms
from fleetpipe.launch.supervisor.state_folder import state_folder


def hold(place: Path, told: Connection) -> None:
    rooms._MEMORY = place
    with state_folder() as folder:
        told.send(folder)
        signal.pause()


def test_what_a_killed_supervisor_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "_MEMORY", tmp_path)
    fork = multiprocessing.get_context("fork")
    told, tells = fork.Pipe(duplex=False)
    other = fork.Process(target=hold, args=(tmp_path, tells), daemon=True)
    other.start()
    theirs = told.recv()
    with state_folder() as own:
        assert own.stat().st_mode & 0o777 == 0o700
        assert {own, theirs} == set(tmp_path.iterdir())
    assert [*tmp_path.iterdir()] == [theirs]
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join()
    with state_folder() as own:
        assert [*tmp_path.iterdir()] == [own]
    assert [*tmp_path.iterdir()] == []
