"""``fleetpipe.resume``: a run that was killed and stopped has the bits of one that was not."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.checkpoint.files import tensors, writer
from fleetpipe.errors import CheckpointError
from fleetpipe.job import attempt_files
from fleetpipe.job.attempt_files import INTERRUPTED, PREEMPTED
from tests.fixtures import Launch, LogCapture, Patch
from tests.launch.supervisor.commands import launched
from tests.launching import ROOT

pytestmark = pytest.mark.once

WORKER = ROOT / "tests" / "launch" / "resume_worker.py"
REPLICAS_WORKER = WORKER.with_name("replicas_worker.py")


def steps(log: str) -> list[str]:
    """What a rank wrote of its steps, in the order in which it did them."""
    return [line for line in log.splitlines() if line.startswith("step ")]


def test_a_killed_and_stopped_job_has_the_same_bits(
    launcher: Launch, launch: Launch, tmp_path: Path
) -> None:
    alone = launch(WORKER, None, args=["9"]).logs[0]
    assert len(steps(alone)) == 9
    options = ["--checkpoint_dir", "shared"]
    happens = ["9", "1.1.4=B1.1", "2.0.6=supervisor"]
    launch_it = (launcher, WORKER, "launch", *options)
    told = launched(*launch_it, "--keep_state", arguments=happens, folder=tmp_path)
    assert told.code == PREEMPTED, told
    # "died (was ended by SIGKILL)", where the other rank had the time to say so.
    assert told.said[0].startswith("fleetpipe: attempt 1 ended in step 4: rank 1 ")
    assert "was ended by SIGKILL" in told.said[0]
    assert told.said[1] == "fleetpipe: attempt 2 begins: restart 1 of 3"
    assert "asked to stop, the job saved 8 steps" in told.said[-1]
    again = launched(*launch_it, arguments=["9"], folder=tmp_path)
    assert (again.code, again.said) == (0, [])
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1)]
    assert "attempt 2 of the job goes on after 4 steps, as they were kept in memory\n" in logs[0]
    assert "attempt 1 of the job goes on after 8 steps\n" in logs[0]
    for log in logs:
        assert steps(log) == steps(alone)
        assert alone.splitlines()[-1] in log


def test_a_signal_to_one_rank_has_all_of_them_save_and_stop(launch: Launch, tmp_path: Path) -> None:
    arguments = ["9", f"0.1.1={signal.SIGUSR1:d}"]
    job = launch(WORKER, 2, args=arguments, cwd=tmp_path, check=False)
    assert job.returncode == PREEMPTED, job
    for log in job.logs:
        assert [line.split()[1] for line in steps(log)] == ["0", "1", "2"]
    assert "fleetpipe: asked to stop, the job saved 3 steps" in job.logs[0]
    resumed = launch(WORKER, 2, args=["4"], cwd=tmp_path)
    assert [line.split()[1] for line in steps(resumed.logs[0])] == ["3"]
    assert "fleetpipe: goes on after 3 steps" in resumed.logs[0]


@pytest.mark.parametrize("command", ["run", "launch"])
def test_two_signals_to_all_processes_save(launcher: Launch, tmp_path: Path, command: str) -> None:
    words = [command, "--nproc", "2", str(WORKER), "9", f"{command == 'launch':d}.0.1=all"]
    script = "import sys; from fleetpipe.cli import main; sys.exit(main(sys.argv[1:]))"
    job = launcher(script, None, args=words, cwd=tmp_path, check=False)
    assert job.returncode == PREEMPTED, job
    assert not re.search("Traceback|Container failed", job.launcher)
    # Rank 1 was asked in the same step or in the one before.
    [saved] = fleetpipe.CheckpointManager(tmp_path / "own").steps()
    assert saved in (2, 3)
    said = f"asked to stop, the job saved {saved} steps: the same command goes on from there"
    assert said in job.launcher
    assert job.launcher.count("the job saved") == 1
    for rank in (0, 1):
        assert len(steps((tmp_path / "log" / f"workerlog.{rank}").read_text())) == saved


def test_replicas_that_come_and_go_see_each_sample(launch: Launch, tmp_path: Path) -> None:
    alone, shared = (tmp_path / name for name in ("alone", "shared"))
    for folder, parts in ((alone, [(None, 12)]), (shared, [(2, 4), (None, 7), (2, 12)])):
        folder.mkdir()
        env = {"FLEETPIPE_CHECKPOINT_DIR": str(folder / "checkpoints")}
        for replicas, until in parts:
            launch(REPLICAS_WORKER, replicas, args=[str(until), str(folder)], env=env)
    for step in range(12):
        (samples, loss), (whole, alone_loss) = (took(folder, step) for folder in (shared, alone))
        assert samples == whole
        assert loss == pytest.approx(alone_loss, rel=1e-5)
    states = [json.loads((folder / "state.json").read_text()) for folder in (alone, shared)]
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=1e-5, atol=1e-7)


def took(folder: Path, step: int) -> tuple[list[int], float]:
    """Returns the samples that all replicas took in a step, in order, and the loss."""
    told = [json.loads(file.read_text()) for file in folder.glob(f"took-{step:03d}-*")]
    return sorted(sample for one in told for sample in one["samples"]), told[0]["loss"]


def test_the_first_ctrl_c_saves_and_the_second_ends_at_once(launch: Launch, tmp_path: Path) -> None:
    arguments = ["9", f"0.0.1={signal.SIGINT:d}"]
    job = launch(WORKER, None, args=arguments, cwd=tmp_path, check=False)
    assert job.returncode == INTERRUPTED, job
    assert "fleetpipe: interrupted, the job saved 2 steps" in job.logs[0]
    twice = ["9", *(f"0.0.3={signal.SIGINT:d}" for _ in range(2))]
    ended = launch(WORKER, None, args=twice, cwd=tmp_path, check=False)
    assert ended.returncode == -signal.SIGINT, ended
    assert "KeyboardInterrupt" in ended.logs[0]
    assert [line.split()[1] for line in steps(ended.logs[0])] == ["2"]


@pytest.fixture
def _own_signals() -> Iterator[None]:
    numbers = signal.SIGTERM, signal.SIGUSR1
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_own_signals")
def test_a_signal_during_a_save_ends_after_it(tmp_path: Path, monkeypatch: Patch) -> None:
    written = threading.Event()
    write_at = tensors.write_at

    def slow(*args: Any) -> None:
        assert written.wait(30)
        write_at(*args)

    monkeypatch.setattr(tensors, "write_at", slow)
    model = nn.Linear(3, 3)
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    manager = fleetpipe.CheckpointManager(tmp_path, save_interval=2, async_save=True)
    run = fleetpipe.resume(model, adam, manager=manager)
    found = {}

    def train() -> None:
        for step in run.steps(9):
            model(paddle.full([2, 3], float(step))).sum().backward()
            adam.step()
            adam.clear_grad()
            found[step + 1] = model.weight.numpy().tobytes()
            if step == 2:
                assert manager.steps() == []  # step 2 is being written
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Timer(0.2, written.set).start()

    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == PREEMPTED
    last = max(found)
    assert last <= 4
    assert manager.steps() == sorted({2, last})
    for step in manager.steps():
        manager.restore(step, model=model, optimizer=adam)
        assert model.weight.numpy().tobytes() == found[step]
    again = fleetpipe.resume(model, adam, manager=fleetpipe.CheckpointManager(tmp_path))
    assert again.step == last


@pytest.mark.usefixtures("_own_signals")
def test_after_its_steps_a_process_ends_by_a_signal(tmp_path: Path, monkeypatch: Patch) -> None:
    assert train_and_save(tmp_path, 2) == [0, 1]
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    # What came before the script of a process that replaces a rank went by resume counts.
    signal.signal(signal.SIGTERM, attempt_files.note_signal)
    monkeypatch.setattr(attempt_files, "early_signals", [])
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        train_and_save(tmp_path / "replaced", 9)
    assert end.value.code == PREEMPTED
    assert fleetpipe.CheckpointManager(tmp_path / "replaced").steps()[-1] <= 2


def interrupted_in_a_save(folder: Path, monkeypatch: Patch, end: str) -> None:
    """Trains until a write of step 6 ends this process, or finds a full disk, as of now."""
    write = writer.write

    def ends(task: writer.Assignment, *more: Any) -> None:
        if task.manifest.step == 6 and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if task.manifest.step == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(task, *more)

    monkeypatch.setattr(writer, "write", ends)
    train_and_save(folder, 7)


def train_and_save(folder: Path, until: int) -> list[int]:
    """Trains with every third step saved, and returns which steps it did."""
    paddle.seed(5)
    np.random.seed(5)
    random.seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    adam = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    done = []
    with fleetpipe.CheckpointManager(folder, save_interval=3) as manager:
        for step in fleetpipe.resume(model, adam, manager=manager).steps(until):
            model(paddle.full([2, 3], float(step))).sum().backward()
            adam.step()
            adam.clear_grad()
            done.append(step)
    return done


@pytest.mark.usefixtures("_own_signals")
@pytest.mark.parametrize("end", ["killed", "full disk"])
def test_an_unfinished_save_is_done_by_the_next_attempt(
    tmp_path: Path, monkeypatch: Patch, end: str
) -> None:
    alone, shared, kept = (tmp_path / name for name in ("alone", "shared", "kept"))
    assert train_and_save(alone, 6) == [*range(6)]
    kept.mkdir()
    monkeypatch.setenv("FLEETPIPE_KEPT_STATE", str(kept))
    if end == "killed":
        fork = multiprocessing.get_context("fork")
        other = fork.Process(target=interrupted_in_a_save, args=(shared, monkeypatch, end))
        other.start()
        other.join()
        assert other.exitcode == -signal.SIGKILL
    else:
        with monkeypatch.context() as until_now:
            # What is full stays so until somebody makes room: the next attempt fails as well.
            for _ in range(2):
                with pytest.raises(CheckpointError, match="No space left"):
                    interrupted_in_a_save(shared, until_now, end)
    assert fleetpipe.CheckpointManager(shared).steps() == [3]
    assert train_and_save(shared, 6) == []
    for step in ("step-00000003", "step-00000006"):
        files = {file.name: file.read_bytes() for file in (alone / step).iterdir()}
        assert files == {file.name: file.read_bytes() for file in (shared / step).iterdir()}


@pytest.mark.usefixtures("_own_signals")
def test_a_run_of_another_script_or_of_other_arguments_is_not_done(
    tmp_path: Path, monkeypatch: Patch, caplog: LogCapture
) -> None:
    caplog.set_level("INFO")

    def train(script: str, *arguments: str, until: int) -> list[int]:
        (tmp_path / script).touch()
        monkeypatch.setattr(sys, "argv", [str(tmp_path / script), *arguments])
        monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        return train_and_save(tmp_path / "run", until)

    assert train("first.py", "--rate", "1", until=3) == [0, 1, 2]
    assert train("first.py", "--rate", "1", until=3) == []
    assert "other arguments" not in caplog.text
    with pytest.raises(CheckpointError, match="nothing is left to do: a run with other arguments"):
        train("first.py", "--rate", "2", until=3)
    with pytest.raises(CheckpointError, match=r"of second.py, (?s:.*)step 3 of first.py"):
        train("second.py", "--rate", "1", until=6)
    assert "the script had other arguments when it saved step 3" in caplog.text
    with monkeypatch.context() as once:
        once.setenv("FLEETPIPE_OTHER_SCRIPT", "1")
        assert train("second.py", until=3) == []
        assert train("second.py", until=6) == [3, 4, 5]
    assert train("second.py", "--longer", until=7) == [6]


@pytest.mark.usefixtures("_own_signals")
def test_after_a_lost_save_the_newest_step_is_saved(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLEETPIPE_KEPT_STATE", str(tmp_path))
    train_and_save(tmp_path / "run", 7)
    # As if the thread that wrote it had been killed: the state of step 6 is not kept any more.
    shutil.rmtree(tmp_path / "run" / "step-00000006")
    assert train_and_save(tmp_path / "run", 7) == []
    assert fleetpipe.CheckpointManager(tmp_path / "run").steps() == [3, 7]
