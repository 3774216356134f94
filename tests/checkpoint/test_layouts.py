"""A folder of checkpoints: one process writes it at a time, and any layout reads it."""

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
from typing import Any, NamedTuple

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, log, parity, systems
from fleetpipe.checkpoint.files import manifest
from fleetpipe.checkpoint.files.run_folder import FolderOwner
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.models import MODELS
from tests.fixtures import LogCapture
from tests.pipelines import adam, bits, job, pipeline

BEFORE, AFTER = range(1, 3), range(3, 5)


class Layout(NamedTuple):
    """How one process plays the ranks of a pipeline."""

    pp: int = 1
    chunks: int | None = None
    schedule: str = "1F1B"


LAYOUTS = {
    "single": Layout(),
    "pp 2": Layout(2),
    "pp 4": Layout(4),
    "v 2": Layout(2, 2, "Interleaved1F1B"),
    "ZBV": Layout(2, 2, "ZBV"),
}


class Run:
    """A model that is trained, and all that decides its next bit."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        paddle.seed(1)
        options = {} if layout.chunks is None else {"num_virtual_pipeline_stages": layout.chunks}
        self.model = pipeline(MODELS["mlp"].layers(), loss_fn=MODELS["mlp"].loss, **options)
        self.rate = paddle.optimizer.lr.StepDecay(0.01, step_size=2)
        adamw = paddle.optimizer.AdamW(self.rate, parameters=self.model.parameters())
        self.optimizer = fleet.distributed_optimizer(adamw)
        self.manager = fleetpipe.CheckpointManager(folder)
        self.objects = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.rate}

    def train(self, steps: range) -> list[bytes]:
        losses = [
            self.model.train_batch(MODELS["mlp"].batch(4, step), self.optimizer, self.rate)
            for step in steps
        ]
        return [loss.numpy().tobytes() for loss in losses]

    def end(self) -> dict[str, Any]:
        """The bits of the parameters, and what is drawn next."""
        return {**bits(self.model.layers.own_state()), "drawn": paddle.rand([4]).numpy().tobytes()}


def hash_of(folder: Path) -> str:
    """The hash of the model that the manifest of the one step in a folder has."""
    return manifest.read_manifest(next(folder.glob("step-*"))).model_hash


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """By layout: the folder that it saved in, and how the run went on there."""
    found = {}
    for name, layout in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("run")
        with job(layout.pp, 4, layout.schedule):
            run = Run(layout, folder)
            run.train(BEFORE)
            run.manager.save(2, **run.objects, extra={"seen": [1, 2.5]})
            found[name] = folder, (run.train(AFTER), run.end())
    return found


@pytest.mark.parametrize("reader", LAYOUTS)
def test_each_layout_goes_on_from_each(reader: str, written: Any) -> None:
    layout = LAYOUTS[reader]
    for writer, (folder, went_on) in written.items():
        with job(layout.pp, 4, layout.schedule):
            run = Run(layout, folder)
            paddle.seed(2)
            restored = run.manager.restore(**run.objects)
            assert fleetpipe.model_hash(run.model) == hash_of(folder)
            assert (restored.step, restored.extra) == (2, {"seen": [1, 2.5]})
            assert (run.train(AFTER), run.end()) == went_on, writer


def test_all_layouts_write_the_same_bytes(written: Any) -> None:
    contents = [
        {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}
        for folder, _ in written.values()
    ]
    assert {name.partition("-")[0] for name in contents[0]} == {"model", "optimizer"}
    assert all(other == contents[0] for other in contents)
    assert len({hash_of(folder) for folder, _ in written.values()}) == 1


class Plain(paddle.nn.Layer):
    """The same layers in a class of its own, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for layer in MODELS["mlp"].layers() if hasattr(layer, "build_layer")]
        for index, layer in enumerate(layers):
            self.add_sublayer(f"part{index}", layer.build_layer())


@pytest.mark.parametrize("writer", LAYOUTS)
def test_a_plain_model_loads_each_and_is_loaded(writer: str, written: Any, tmp_path: Path) -> None:
    folder, _ = written[writer]
    layout = LAYOUTS[writer]
    plain = Plain()
    adamw = paddle.optimizer.AdamW(0.5, parameters=plain.parameters())
    assert fleetpipe.load_single(plain, folder, optimizer=adamw) == 2
    # A process without a job saves it under names of its own, and the pipeline goes by the order.
    fleetpipe.CheckpointManager(tmp_path).save(5, model=plain, optimizer=adamw)
    ended = []
    for home, step, chosen in [(folder, 2, None), (tmp_path, 5, ("model", "optimizer"))]:
        with job(layout.pp, 4, layout.schedule):
            run = Run(layout, home)
            assert run.manager.restore(**run.objects, only=chosen).step == step
            whole = run.model.layers.full_state_dict()
            assert [*bits(whole).values()] == [*bits(plain.state_dict()).values()]
            run.rate.set_state_dict({"last_epoch": 2, "last_lr": 0.001})
            ended.append((run.train(AFTER), bits(run.model.layers.own_state())))
    assert ended[0] == ended[1]


class Memory(nn.Layer):
    """Adds what it remembers of the micro-batches before, in a buffer of one of several kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        if kind == "none":
            self.register_buffer("memory", None)
        if kind == "grows":
            self.register_buffer("memory", paddle.zeros([1, 4]))

    def forward(self, value: Any) -> Any:
        hidden = self.linear(value)
        if self.kind == "table":
            if not hasattr(self, "table"):
                self.register_buffer("table", paddle.arange(4.0), persistable=False)
            return hidden + self.table
        if self.kind == "registered" and not hasattr(self, "memory"):
            self.register_buffer("memory", paddle.zeros([1, 4]))
        seen = hidden.detach() if self.memory is None else self.memory
        output = hidden + 0.5 * seen.mean(axis=0)
        rows = paddle.concat([seen, hidden.detach()]) if self.kind == "grows" else seen + 1
        self.memory = rows[-6:]
        return output


@pytest.mark.parametrize("given", ["described", "built"])
@pytest.mark.parametrize("kind", ["none", "registered", "grows", "table"])
def test_buffers_that_forwards_make_or_enlarge_come_back(
    kind: str, given: str, tmp_path: Path, caplog: LogCapture
) -> None:
    def made() -> tuple[Any, Any]:
        paddle.seed(3)
        layers = [LayerDesc(Memory, kind), LayerDesc(nn.Linear, 4, 4)]
        if given == "built":
            layers = [layer.build_layer() for layer in layers]
        model = pipeline(layers, loss_fn=nn.MSELoss())
        return model, adam(model)

    def trained(model: Any, optimizer: Any, steps: range) -> list[float]:
        batches = [paddle.full([8, 4], step / 7.0) for step in steps]
        return [float(model.train_batch([b, b], optimizer)) for b in batches]

    manager = fleetpipe.CheckpointManager(tmp_path)
    with job(2, 4):
        model, optimizer = made()
        trained(model, optimizer, BEFORE)
        manager.save(2, model=model, optimizer=optimizer)
        log.once.cache_clear()
        went_on = trained(model, optimizer, AFTER), bits(model.layers.full_state_dict())
    assert ("leaves out 0.memory, which" in caplog.text) == (kind in ("none", "registered"))
    with job(2, 4):
        model, optimizer = made()
        manager.restore(model=model, optimizer=optimizer)
        again = trained(model, optimizer, AFTER), bits(model.layers.full_state_dict())
        assert again == went_on
    with job(2, 4):
        session = parity.begin(*made())
        for step in BEFORE:
            value = paddle.full([8, 4], step / 7.0)
            session.step([value, value])
        assert session.report.passed, session.report.verdict()


def test_parameters_that_a_model_was_given_later_are_refused_before_they_are_saved(
    tmp_path: Path,
) -> None:
    with job(2, 4):
        run = Run(Layout(2), tmp_path)
        layer = dict(run.model.layers.named_children())["0"]
        layer.adapter = layer.create_parameter([1])
        with pytest.raises(CheckpointError, match=r"got: 0\.adapter"):
            run.manager.save(1, **run.objects)
        assert run.manager.steps() == []


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


def test_a_copy_of_the_folder_and_a_fork_that_stays_leave_the_lock_as_it_is(tmp_path: Path) -> None:
    manager = save(tmp_path / "mine", 1)
    shutil.copytree(tmp_path / "mine", tmp_path / "backup")
    fork = multiprocessing.get_context("fork")

    def exit_code_of_another() -> int | None:
        other = fork.Process(target=save, args=(tmp_path / "mine", 2))
        other.start()
        other.join()
        return other.exitcode

    assert exit_code_of_another() == 1
    # As a worker of a loader that outlives the process that was killed.
    worker = fork.Process(target=signal.pause, daemon=True)
    worker.start()
    owner = FolderOwner.for_folder(tmp_path / "mine")
    os.close(owner._lock.descriptor)
    owner._lock.process = 0
    assert exit_code_of_another() == 0
    worker.kill()
    worker.join()
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
