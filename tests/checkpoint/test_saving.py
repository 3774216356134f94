"""When a step is saved, what is kept, and what a writer in the background may do and may not."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.arguments import new_file
from fleetpipe.checkpoint.contents.parts import MODEL, TensorName
from fleetpipe.checkpoint.files import tensors, writer
from fleetpipe.checkpoint.files.writer import Snapshot
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.mesh.parts import LocalTensor
from fleetpipe.transport.wire import bridge
from tests.fixtures import Call, LogCapture, Patch
from tests.pipelines import CLASSES, batch, bits, job, mlp_and_sgd, model_in_job, pipeline, sgd


def model(value: float = 0.0) -> Any:
    made = nn.Linear(3, 3)
    fill(made, value)
    return made


def fill(made: Any, value: float) -> None:
    for parameter in made.parameters():
        parameter.set_value(paddle.full(parameter.shape, value))


def value_at(folder: Path, step: int | str = "latest") -> float:
    """What all parameters of a step are."""
    made = model(-1.0)
    fleetpipe.CheckpointManager(folder, best=("loss", "min")).restore(step, model=made)
    found = {float(number) for p in made.parameters() for number in p.flatten().tolist()}
    assert len(found) == 1
    return found.pop()


def test_steps_are_saved_at_the_interval_and_where_forced(tmp_path: Path) -> None:
    manager = fleetpipe.CheckpointManager(tmp_path / "new" / "run", save_interval=3)
    made = model()
    saved = [step for step in range(8) if manager.save(step, model=made) is not None]
    assert saved == manager.steps() == [0, 3, 6]
    handle = manager.save(7, model=made, force=True)
    assert handle is not None
    handle.wait()
    assert manager.steps() == [0, 3, 6, 7]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_newest_and_the_best_are_kept(tmp_path: Path, in_background: bool) -> None:
    manager = fleetpipe.CheckpointManager(
        tmp_path, max_to_keep=2, best=("loss", "min"), async_save=in_background
    )
    kept = []
    for step, loss in enumerate([5.0, 1.0, 3.0, 1.5, 2.0]):
        manager.save(step, model=model(step), metrics={"loss": loss, "other": 1})
        manager.wait()
        kept.append(manager.steps())
    assert kept == [[0], [0, 1], [1, 2], [1, 2, 3], [1, 3, 4]]
    assert value_at(tmp_path, "best") == 1
    assert value_at(tmp_path) == 4
    assert manager.restore(3, model=model()).metrics == {"loss": 1.5, "other": 1}
    # Another manager knows what the first one has seen.
    fleetpipe.CheckpointManager(tmp_path, max_to_keep=1, best=("loss", "max")).save(
        5, model=model(5), metrics={"loss": 1.8}
    )
    assert manager.steps() == [4, 5]
    assert not [*tmp_path.glob(".draft*")]


def test_what_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    for mode in ("min", "max"):
        home = tmp_path / mode
        manager = fleetpipe.CheckpointManager(home, max_to_keep=1, best=("loss", mode))
        for step, loss in enumerate([math.nan, 2.0, math.nan, math.nan]):
            manager.save(step, model=model(step), metrics={"loss": loss})
        assert manager.steps() == [1, 3]
        assert value_at(home, "best") == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_latest_is_the_step_that_was_saved_last(
    tmp_path: Path, in_background: bool, caplog: LogCapture
) -> None:
    manager = fleetpipe.CheckpointManager(
        tmp_path, max_to_keep=3, best=("loss", "min"), async_save=in_background
    )
    for step in (20, 40, 60, 80):
        manager.save(step, model=model(step), metrics={"loss": 1 / step})
    assert manager.restore(40, model=model()).step == 40
    assert not caplog.messages
    assert manager.restore(model=model()).step == 80  # until the run goes on from 40
    manager.restore(40, model=model())
    manager.save(50, model=model(50), metrics={"loss": 1 / 50})
    manager.wait()
    assert manager.steps() == [40, 50]
    assert value_at(tmp_path) == value_at(tmp_path, "best") == 50
    told = caplog.text
    assert "step 50 is saved; the run had gone on to step 80" in told
    assert "step-00000060.aside, step-00000080.aside" in told
    # One that is set aside is whole, and a step again under its old name.
    (tmp_path / "step-00000060.aside").rename(tmp_path / "step-00000060")
    assert value_at(tmp_path) == 60
    manager.save(40, model=model(41), metrics={"loss": 1.0})
    manager.wait()
    assert manager.steps() == [40]
    assert value_at(tmp_path, "best") == 41
    names = [f"step-000000{step}.aside" for step in (50, 60, 80)]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["step-00000040", *names]
    # A second one of the same number takes nothing from the first.
    for step in (60, 41):
        manager.save(step, model=model(step), metrics={"loss": 1.0})
    manager.wait()
    assert (tmp_path / "step-00000060.aside").exists()
    (tmp_path / "step-00000060.aside-2").rename(tmp_path / "step-00000060")
    assert value_at(tmp_path) == 60


def test_values_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    for options in ({"save_interval": 0}, {"max_to_keep": 0}, {"best": ("loss", "least")}):
        with pytest.raises(ConfigError):
            fleetpipe.CheckpointManager(tmp_path, **options)
    manager = fleetpipe.CheckpointManager(tmp_path, best=("loss", "min"))
    with pytest.raises(ConfigError, match="needs the metric 'loss'"):
        manager.save(1, model=model(), metrics={"accuracy": 1.0})
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\] cannot be saved"):
        fleetpipe.CheckpointManager(tmp_path).save(1, model=model(), extra={"a": [1, object()]})
    with pytest.raises(ConfigError, match=r"none was given(.|\n)*pass model="):
        fleetpipe.CheckpointManager(tmp_path).save(1, model=None)
    for step in (-1, "3", 1.5, True):
        with pytest.raises(ConfigError, match="under its number"):
            fleetpipe.CheckpointManager(tmp_path).save(step, model=model())
    data: Any = [1, 2]
    with pytest.raises(ConfigError, match=r"data=.*\n.*state_dict.*\n.*a list"):
        fleetpipe.resume(model(), data=data, manager=fleetpipe.CheckpointManager(tmp_path))
    assert not list(tmp_path.glob("step*"))


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_copy_is_written_while_training_goes_on(tmp_path: Path, monkeypatch: Patch) -> None:
    go_on = threading.Event()
    write_at = tensors.write_at
    nice = set()

    def later(*args: Any) -> None:
        nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert go_on.wait(30)
        write_at(*args)

    monkeypatch.setattr(tensors, "write_at", later)
    manager = fleetpipe.CheckpointManager(tmp_path, async_save=True, save_interval=2)
    made = model(2.0)
    manager.save(2, model=made)
    fill(made, 3.0)
    assert manager.save(3, model=made) is None
    assert manager.steps() == []
    go_on.set()
    manager.save(4, model=made)
    assert manager.steps()[0] == 2
    manager.wait()
    assert [value_at(tmp_path, step) for step in manager.steps()] == [2.0, 3.0]
    # Who trains comes first.
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == {max(10, own)}


def test_folders_are_those_of_the_time_when_they_were_given(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    report = new_file("report.json")
    with job(2, trace="trace"):
        layers = pipeline([nn.Linear(6, 4), nn.Linear(4, 4)])
        optimizer = sgd(layers)
        manager = fleetpipe.CheckpointManager("saved", save_interval=1)
        monkeypatch.chdir("elsewhere")
        layers.train_batch(batch(), optimizer)
        manager.save(1, model=layers, optimizer=optimizer)
    assert manager.steps() == [1]
    assert (tmp_path / "trace" / "trace.json").exists()
    assert report == tmp_path / "report.json"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_copies_lie_in_the_same_memory_from_save_to_save() -> None:
    snapshot = Snapshot()

    def taken(*arrays: Any) -> list[tuple[int, bytes]]:
        held = {
            TensorName(MODEL, str(number)): LocalTensor(array)
            for number, array in enumerate(arrays)
        }
        copies = snapshot.take(held).values()
        return [(np.frombuffer(copy, np.uint8).ctypes.data, bytes(copy)) for copy in copies]

    ones, twos = np.ones(5, "float32"), np.full((3, 3), 2.0)
    none = np.ones(0, "float32")
    first = taken(ones, none, twos)
    assert [copy for _, copy in first] == [ones.tobytes(), b"", twos.tobytes()]
    again = taken(3 * ones, none, 5 * twos)
    assert [copy for _, copy in again] == [(3 * ones).tobytes(), b"", (5 * twos).tobytes()]
    assert [place for place, _ in again] == [place for place, _ in first]
    assert [copy for _, copy in taken(twos, ones)] == [twos.tobytes(), ones.tobytes()]


def test_bytes_of_a_copy_live_as_long_as_they_are_used(monkeypatch: Patch) -> None:
    # As a tensor on a GPU has it: its bytes on the host are those of a copy.
    monkeypatch.setattr(bridge, "plain", lambda tensors: [one.clone() for one in tensors])
    memory = writer.bytes_of_tensor(LocalTensor(paddle.full([12], 3.0)))
    taken = [paddle.full([12], 7.0) for _ in range(50)]
    assert np.frombuffer(memory, "float32").tolist() == [3.0] * 12, taken


def test_ranks_meet_twice_in_a_save_of_what_they_held_before(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    together = Ranks.together
    meetings: list[str] = []

    def counted(ranks: Ranks, what: str, act: Any) -> Any:
        meetings.append(what)
        return together(ranks, what, act)

    monkeypatch.setattr(Ranks, "together", counted)
    manager = fleetpipe.CheckpointManager(tmp_path)
    for step in range(3):
        manager.save(step, model=paddle.nn.Linear(2, 2))
    assert meetings == [f"saving step {step}" for step in (0, 0, 0, 0, 1, 1, 2, 2)]


def test_a_with_waits_for_what_is_saved_and_hides_no_error(
    tmp_path: Path, monkeypatch: Patch, caplog: LogCapture
) -> None:
    made = model(1.0)
    with fleetpipe.CheckpointManager(tmp_path, async_save=True) as manager:
        manager.save(1, model=made)
    assert manager.steps() == [1]

    def save_and_fail(step: int) -> None:
        with manager:
            manager.save(step, model=made)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save_and_fail(2)
    assert manager.steps() == [1, 2]

    monkeypatch.setattr(tensors, "write_at", no_space)
    with pytest.raises(CheckpointError, match="saving step 3 failed"), manager:
        manager.save(3, model=made)
    with pytest.raises(ZeroDivisionError):
        save_and_fail(4)
    assert manager.steps() == [1, 2]
    assert [text[:35] for text in caplog.messages] == ["step 4 was not saved by this rank: "]
    with pytest.raises(CheckpointError, match="saving step 4 failed"):
        manager.wait()


#: Trains nothing, and saves into the folder of its first argument, last into another beside it.
LAST_WORDS = """
import errno, sys, time
import fleetpipe
from fleetpipe.checkpoint.files import tensors
from paddle import nn

made, write_at = nn.Linear(300, 300), tensors.write_at

def full(file, *arguments):
    if ".draft-00000002" in file.name:
        raise OSError(errno.ENOSPC, "No space left on device")
    if "beside" in file.name:
        time.sleep(0.5)
    write_at(file, *arguments)

tensors.write_at = full

def save(step, folder=sys.argv[1]):
    fleetpipe.CheckpointManager(folder, async_save=True).save(step, model=made)

save(1)
save(2)
save(1, sys.argv[1] + "-beside")
if "fails" in sys.argv:
    sys.exit(3)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("words", "code"), [(("full",), 70), (("full", "fails"), 3)])
def test_a_process_does_not_end_well_over_a_save_that_is_lost(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", LAST_WORDS, str(run), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr
    assert fleetpipe.CheckpointManager(run).steps() == [1]
    assert fleetpipe.CheckpointManager(tmp_path / "run-beside").steps() == [1]
    for said in ("step 2 was not saved", "No space left", str(run)):
        assert said in ended.stderr


def test_what_cannot_go_is_no_part_of_a_save(
    tmp_path: Path, monkeypatch: Patch, caplog: LogCapture
) -> None:
    made = model(1.0)

    def save(step: int) -> None:
        manager = fleetpipe.CheckpointManager(tmp_path / "run", max_to_keep=2)
        manager.save(step, model=made)
        manager.release()

    save(1)
    save(2)
    # Of a link, what it leads to stays.
    (tmp_path / "run" / "step-00000001").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    save(3)
    assert value_at(tmp_path / "run") == 1.0
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()
    assert not caplog.messages

    def not_mine(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr("fleetpipe.checkpoint.files.run_folder.shutil.rmtree", not_mine)
    save(4)
    save(5)
    manager = fleetpipe.CheckpointManager(tmp_path / "run")
    assert manager.steps() == [4, 5]
    # What stays is named once, however many jobs pass it over.
    left = [path.name for path in (tmp_path / "run").glob(".draft-*")]
    assert len(left) == 2
    assert [sum(name in text for text in caplog.messages) for name in left] == [1, 1]


def save_on_a_full_disk(home: Path) -> tuple[list[Any], list[list[int]], list[float]]:
    """Saves in two ways where rank 1's disk is full in steps 1 and 3: errors, steps and losses."""
    rank = paddle.distributed.get_rank()
    write_at = tensors.write_at
    with mlp_and_sgd(2, timeout=20) as (model, optimizer):
        told, losses = [], []
        managers = [
            fleetpipe.CheckpointManager(home / name, async_save=name == "async")
            for name in ("sync", "async")
        ]
        for step in range(5):
            losses.append(model.train_batch(batch(seed=step), optimizer).item())
            if rank == 1:
                tensors.write_at = no_space if step in (1, 3) else write_at
            for manager in managers:
                try:
                    manager.save(step, model=model, optimizer=optimizer)
                except CheckpointError as error:
                    told.append([step, str(error).splitlines()[0]])
        managers[1].wait()
        managers[1].save(9, model=model, optimizer=optimizer)
        steps = [manager.steps() for manager in managers]
    managers[1].wait()  # after the job has ended, too
    return told, steps, losses


def test_a_full_disk_of_one_rank_fails_the_save_on_all(on_ranks: Call, tmp_path: Path) -> None:
    first, other = on_ranks(save_on_a_full_disk, 2, tmp_path)
    for report in (first, other):
        report[1][1] = [step for step in report[1][1] if step < 9]  # still being written, or not
    assert first == other
    told, steps, losses = first
    reason = "failed on rank 1 of the job: [Errno 28] No space left on device"
    # In the background the error comes with the next save, which goes on.
    assert told == [
        [1, f"saving step 1 {reason}"],
        [2, f"saving step 1 {reason}"],
        [3, f"saving step 3 {reason}"],
        [4, f"saving step 3 {reason}"],
    ]
    assert steps == [[0, 2, 4], [0]]
    assert fleetpipe.CheckpointManager(tmp_path / "async").steps() == [0, 9]
    assert not [*tmp_path.glob("*/.draft*")]
    assert len(losses) == 5


def save_apart(homes: Path) -> None:
    """Saves in folders of their own, as on hosts that share no disk.

    In step 3 the first one's disk is full for what the other holds.
    """
    rank = paddle.distributed.get_rank()
    with job(2):
        paddle.seed(1)
        model = pipeline()
        optimizer = sgd(model)
        manager = fleetpipe.CheckpointManager(homes / str(rank), async_save=True)
        for step in range(1, 3):
            model.train_batch(batch(), optimizer)
            manager.save(step, model=model, optimizer=optimizer)
        write = writer.write

        def full(task: Any, bytes_of: Any) -> None:
            if task.rank == 1:
                no_space()
            write(task, bytes_of)

        writer.write = full
        failed = r"saving step 3 failed on rank 0 of the job: \[Errno 28\]"
        with pytest.raises(CheckpointError, match=failed):
            manager.save(3, model=model)
        writer.write = write
        model.train_batch(batch(), optimizer)
        manager.save(4, model=model, optimizer=optimizer)
        assert manager.steps() == ([] if rank else [1, 2, 4])


def test_ranks_that_share_no_disk_save_on_that_of_the_first(on_ranks: Call, tmp_path: Path) -> None:
    on_ranks(save_apart, 2, tmp_path)
    with job():
        paddle.seed(1)
        model = pipeline()
        optimizer = sgd(model)
        losses = [model.train_batch(batch(), optimizer) for _ in range(3)]
        state = bits(model.state_dict())
        again = pipeline()
        fleetpipe.CheckpointManager(tmp_path / "0").restore(model=again)
        assert bits(again.state_dict()) == state, losses


class Centred(nn.Layer):
    """A loss with a trained weight, a buffer, and one that its first batch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([1])
        self.register_buffer("centre", paddle.zeros([CLASSES]))

    def forward(self, output: Any, label: Any) -> Any:
        if not hasattr(self, "calls"):
            self.register_buffer("calls", paddle.zeros([1]), persistable=False)
        with paddle.no_grad():
            self.calls.set_value(self.calls + 1)
            self.centre.set_value(0.9 * self.centre + 0.1 * output.mean(0))
        by_row = nn.functional.cross_entropy(output - self.centre / self.calls, label)
        return by_row * self.weight.exp()


def _trained(folder: Path, steps: tuple[int, int]) -> list[bytes]:
    """Trains some steps behind those that are saved, and saves; returns the losses and weight."""
    with model_in_job(2, micro_batches=2, loss_fn=Centred()) as pipe:
        loss = pipe.layers.loss_layers()[0]
        loss.weight.set_value(paddle.full([1], 0.5))
        adam = paddle.optimizer.Adam(0.1, parameters=pipe.parameters())
        optimizer = fleet.distributed_optimizer(adam)
        manager = fleetpipe.CheckpointManager(folder)
        if manager.steps():
            manager.restore(model=pipe, optimizer=optimizer)
        losses = [pipe.train_batch(batch(2, seed=step), optimizer) for step in range(*steps)]
        manager.save(steps[1], model=pipe, optimizer=optimizer)
        return [value.numpy().tobytes() for value in (*losses, loss.weight)]


def test_what_a_loss_has_learned_and_counted_is_restored(on_ranks: Call, tmp_path: Path) -> None:
    whole = _trained(tmp_path / "whole", (0, 6))
    _trained(tmp_path / "parts", (0, 3))
    # The last rank alone computes the loss, and what it has is the state of all.
    ranks = on_ranks(_trained, 2, tmp_path / "parts", (3, 6))
    assert [losses[:3] for losses in ranks] == [whole[3:6]] * 2
    assert ranks[1] == whole[3:]
    assert _trained(tmp_path / "parts", (6, 6))[-1] == whole[-1]
