"""The folder of a command: its own while it lives; all that it started ends with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fleetpipe.launch import command_folder as folders
from fleetpipe.launch.command_folder import command_folder
from tests.fixtures import Launch, Patch


def hold(place: Path, told: Connection) -> None:
    folders._MEMORY = place
    with command_folder() as folder:
        told.send(folder)
        signal.pause()


def test_what_a_killed_command_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(folders, "_MEMORY", tmp_path)
    fork = multiprocessing.get_context("fork")
    told, tells = fork.Pipe(duplex=False)
    other = fork.Process(target=hold, args=(tmp_path, tells), daemon=True)
    other.start()
    theirs = told.recv()
    with command_folder() as own:
        assert own.stat().st_mode & 0o777 == 0o700
        assert {own, theirs} == set(tmp_path.iterdir())
    assert [*tmp_path.iterdir()] == [theirs]
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join()
    with command_folder() as own:
        assert [*tmp_path.iterdir()] == [own]
    assert [*tmp_path.iterdir()] == []


#: A rank, with a process of its own in its session.
TRAIN = """
import os, pathlib, time
os.fork()
pathlib.Path("folder").write_text(os.environ.get("FLEETPIPE_COMMAND_FOLDER", "."))
pathlib.Path("rank." + os.environ["PADDLE_TRAINER_ID"]).touch()
time.sleep(100)
"""
#: Sends a signal to those processes of a command of which the words are.
KILL = """
    import os, pathlib, subprocess, sys, time
    from tests.launching import MARK, processes
    number, words, *command = sys.argv[1:]
    started = subprocess.Popen([sys.executable, "-m", "fleetpipe", *command])
    while len([*pathlib.Path().glob("rank.*")]) < 2:
        assert started.poll() is None
        time.sleep(0.05)
    for process, line in processes(os.environ[MARK]).items():
        if any(word in line for word in words.split(",")):
            os.kill(process, int(number))
    started.wait()
    """


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "number", "words"),
    [
        ("run", signal.SIGHUP, "-m fleetpipe"),
        ("locate", signal.SIGTERM, "-m fleetpipe"),
        ("launch", signal.SIGKILL, "-m fleetpipe"),
        # All but the ranks.
        ("launch", signal.SIGKILL, "-m fleetpipe,pod_server.py"),
    ],
)
def test_no_process_outlives_the_command_that_started_it(
    launch: Launch, tmp_path: Path, command: str, number: signal.Signals, words: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "temporary").mkdir()
    job = [command, "--nproc", "2", "train.py"]
    env = {"TMPDIR": str(tmp_path / "temporary")}
    # It raises an error if a process is left.
    ended = launch(KILL, None, args=[str(int(number)), words, *job], env=env, cwd=tmp_path)
    assert '  File "' not in ended.logs[0]
    assert [*(tmp_path / "temporary").iterdir()] == []
    left = Path((tmp_path / "folder").read_text())
    with command_folder():  # which removes what ranks that were left alone did not
        assert not left.exists()
