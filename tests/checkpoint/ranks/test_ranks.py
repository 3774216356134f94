"""Ranks that hold slices, shards, replicas and tied weights, and one process, read each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.checkpoint.files import tensors
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.errors import CheckpointError, StateError
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from fleetpipe.static import state_dict
from tests.checkpoint.test_layouts import hash_of
from tests.checkpoint.test_static import AFTER, BEFORE, Dynamic, Static
from tests.dygraph import models
from tests.dygraph.models import LENGTH, MODELS, WIDTH
from tests.fixtures import Call, Patch
from tests.pipelines import bits, job, pipeline
from tests.static.networks import static_mode

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
#: What a program and a model are called by each other.
Arrays = dict[str, np.ndarray]


def part(feeds: Sequence[Any]) -> list[Any]:
    """This replica's part of the data."""
    return [{name: np.split(rows, 2)[RANK] for name, rows in feed.items()} for feed in feeds]


def of_model(run: Dynamic) -> Arrays:
    return {name: tensor.numpy() for name, tensor in run.model.layers.own_state().items()}


def statistics(state: Arrays) -> Any:
    """The running means and variances, which are no parameters."""
    return {
        name: array.tolist()
        for name, array in state.items()
        if name.rpartition(".")[2] in ("_mean", "_variance", "w_1", "w_2")
    }


def same(one: Arrays, other: Arrays) -> bool:
    return {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}


def dynamic(home: Path) -> tuple[Any, bool]:
    with job(1, 2, dp=2):
        run = Dynamic()
        run.train(part(BEFORE))
        fleetpipe.CheckpointManager(home).save(3, **run.objects)
        saved = statistics(of_model(run))
        losses, ended = run.train(part(AFTER)), of_model(run)
    with job(1, 2, dp=2):
        run = Dynamic(seed=9)
        fleetpipe.CheckpointManager(home).restore(**run.objects)
        return saved, run.train(part(AFTER)) == losses and same(of_model(run), ended)


def static(home: Path) -> tuple[Any, bool]:
    with static_mode():
        run = Static(1, micro_batches=2)
        run.train(part(BEFORE))
        fleetpipe.CheckpointManager(home).save(3, **run.objects)
        saved = statistics(state_dict())
        losses, ended = run.train(part(AFTER)), state_dict()
    with static_mode():
        run = Static(1, seed=9, micro_batches=2)
        fleetpipe.CheckpointManager(home).restore(**run.objects)
        return saved, run.train(part(AFTER)) == losses and same(state_dict(), ended)


def stages(home: Path) -> Any:
    with static_mode():
        run = Static(dropout=[0, 1])
        run.train(BEFORE)
        fleetpipe.CheckpointManager(home, async_save=True).save(3, **run.objects)
        run.train(AFTER)
        return {name: array.tobytes() for name, array in state_dict().items()}


def everything(folder: Path) -> dict[str, Any]:
    """How replicas went on in both graphs, and the state of the stages, saved in FOLDER/stages."""
    replicas = {"dynamic": dynamic(folder / "dynamic"), "static": static(folder / "static")}
    return {"replicas": replicas, "stages": stages(folder / "stages")}


LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"pp": 2},
    "pp": {"pp": 2},
    "zbv": {"pp": 2, "schedule": "ZBV"},
    "mp": {"mp": 2},
    "dp": {"dp": 2, "micro_batches": 2},
    "sharding": {"sharding": 2, "micro_batches": 2},
}
#: Folders of one checkpoint, by the format that each has, and the run itself.
FORMS = ("unified", "formers", "distributed", "run")


class Sliced(nn.Layer):
    """Two products cut along either axis, with a statistic of its own and one that nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True)
        self.places = VocabParallelEmbedding(2 * LENGTH, WIDTH)
        self.register_buffer("calls", paddle.zeros([1]))
        self.register_buffer("hidden", paddle.zeros([2]), persistable=False)

    def forward(self, x: Any) -> Any:
        with paddle.no_grad():
            self.calls.add_(paddle.ones([1]))
            self.hidden.add_(paddle.ones([2]))
        y = self.down(nn.functional.gelu(self.up(x + self.places(paddle.arange(LENGTH)))))
        return x + nn.functional.dropout(y, 0.1, training=self.training)


def layers() -> list[Any]:
    """An embedding that is the head too, and sliced layers between."""
    return [
        SharedLayerDesc("embed", models.Tokens, None, "embedding_weight"),
        LayerDesc(Sliced),
        LayerDesc(nn.LayerNorm, WIDTH),
        LayerDesc(Sliced),
        SharedLayerDesc("embed", models.Tokens, models.logits, "embedding_weight"),
    ]


class Run:
    """A model in the current job, and what it is trained with."""

    def __init__(self) -> None:
        paddle.seed(5)
        self.model = pipeline(layers(), loss_fn=models.loss)
        self.rate = paddle.optimizer.lr.NaturalExpDecay(0.01, 0.1)
        adamw = paddle.optimizer.AdamW(self.rate, parameters=self.model.parameters())
        self.optimizer = fleet.distributed_optimizer(adamw)
        self.objects = {"model": self.model, "optimizer": self.optimizer}

    def train(self, step: int) -> float:
        replicas, place = self.model.replicas.ranks, self.model.replicas.rank
        rows = [t.chunk(replicas)[place] for t in MODELS["gpt"].batch(4, step)]
        return float(self.model.train_batch(rows, self.optimizer, self.rate).item())


def contents(folder: Path) -> dict[str, bytes]:
    """The files of tensors of the one step in a folder."""
    return {path.name: path.read_bytes() for path in folder.glob("step-*/*.safetensors")}


def write(home: Path, names: list[str]) -> dict[str, float]:
    """Trains two steps under each layout and saves; returns the losses of the third step."""
    losses = {}
    for name in names:
        with job(**{"micro_batches": 4, **LAYOUTS[name]}):
            run = Run()
            for step in range(2):
                run.train(step)
            manager = fleetpipe.CheckpointManager(home / name, async_save=name != "alone")
            manager.save(2, **run.objects)
            hashed = fleetpipe.model_hash(run.model)
            losses[name] = run.train(2)
            manager.wait()
            assert hash_of(home / name) == hashed
            if name == "dp":
                norm = run.model.layers.own_state()["2.weight"]
                norm.set_value(norm + RANK)
                with pytest.raises(
                    StateError, match=r"the same values of '2\.weight' of the model"
                ):
                    fleetpipe.model_hash(run.model)
    return losses


def read(home: Path, names: list[str]) -> dict[str, tuple[bool, float]]:
    """Restores what all have saved, under each of the layouts, and saves it again at once.

    Returns whether files of tensors and hash are the same, and the loss of the third step.
    """
    found = {}
    for name in names:
        with job(**{"micro_batches": 4, **LAYOUTS[name]}):
            run = Run()
            for writer in LAYOUTS:
                fleetpipe.CheckpointManager(home / writer).restore(**run.objects)
                copy = home / f"{name} from {writer}"
                fleetpipe.CheckpointManager(copy).save(2, **run.objects)
                same = contents(copy) == contents(home / writer)
                same &= fleetpipe.model_hash(run.model) == hash_of(home / writer)
                found[f"{name} from {writer}"] = same, run.train(2)
    return found


def load(home: Path, layout: dict[str, int]) -> list[Any]:
    """Loads the same checkpoint in each format, and saves it.

    Returns for each whether its files are those of ``alone``, the number of the learning rate's
    step, and the bytes that this rank has read; last what is said of one without a file.
    """
    results: list[Any] = []
    with job(micro_batches=4, **layout):
        for form in FORMS:
            run = Run()
            with pytest.MonkeyPatch.context() as patched:
                sizes: list[int] = []

                def counted(*args: Any, to: list[int] = sizes, read: Any = tensors.read) -> None:
                    to.append(len(args[-1]))
                    read(*args)

                patched.setattr(tensors, "read", counted)
                assert fleetpipe.load_checkpoint(home / form, **run.objects) == 2 * (form == "run")
            copy = home / f"{form} on {layout}"
            fleetpipe.CheckpointManager(copy).save(2, **run.objects)
            # Buffers that no state dict has stand in fleetpipe's own runs alone.
            saved, expected = (
                {n: f for n, f in contents(one).items() if n[0] != "b"}
                for one in (copy, home / "alone")
            )
            same = saved == expected
            results.append((same, run.rate.last_epoch, sum(sizes)))
        before = bits(run.model.layers.own_state())
        with pytest.raises(CheckpointError) as caught:
            fleetpipe.load_checkpoint(home / "cut short", **run.objects)
        assert bits(run.model.layers.own_state()) == before
        return [*results, str(caught.value)]


OF_TWO = [name for name in LAYOUTS if name != "alone"]
#: Layouts in which all sums have the same order; the others agree to rounding.
SAME_ORDER = {"alone", "pp", "zbv"}


def test_each_layout_reads_each(on_ranks: Call, tmp_path: Path) -> None:
    written, *_ = on_ranks(write, 2, tmp_path, OF_TWO)
    losses = {**written, **write(tmp_path, ["alone"])}
    first, second = on_ranks(read, 2, tmp_path, OF_TWO)
    assert first == second
    found = {**first, **read(tmp_path, ["alone"])}
    assert found.keys() == {f"{one} from {other}" for one in LAYOUTS for other in LAYOUTS}
    for pair, (same_files, loss) in found.items():
        reader, writer = pair.split(" from ")
        assert same_files, pair
        if {reader, writer} <= SAME_ORDER or reader == writer:
            assert loss == losses[writer], pair
        else:
            assert abs(loss - losses[writer]) < 1e-5, pair


def test_launched_processes_need_a_job_first(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(StateError, match="do not know each other yet"):
        Ranks.of_job()


def test_each_replica_goes_on_with_its_own_statistics(on_ranks: Call, tmp_path: Path) -> None:
    first, second = on_ranks(everything, 2, tmp_path)
    for graph in ("dynamic", "static"):
        (mine, same), (theirs, same_there) = (one["replicas"][graph] for one in (first, second))
        assert same, graph
        assert same_there, graph
        assert mine.keys() == theirs.keys()
        assert all(mine[name] != theirs[name] for name in mine), "no test of anything"
    # One process that is no replica takes the first one's.
    with job():
        run = Dynamic()
        fleetpipe.CheckpointManager(tmp_path / "dynamic").restore(**run.objects)
        assert statistics(of_model(run)) == first["replicas"]["dynamic"][0]
    # What two ranks drew for their stages one process draws for both.
    with static_mode():
        other = Static(seed=9, dropout=[0, 1])
        fleetpipe.CheckpointManager(tmp_path / "stages").restore(**other.objects)
        other.train(AFTER)
        state = {name: array.tobytes() for name, array in state_dict().items()}
    assert state == {**first["stages"], **second["stages"]}
