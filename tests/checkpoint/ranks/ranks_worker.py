"""Layouts of a job, one after another: each writes a checkpoint, and reads those of all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from tests.dygraph import tied
from tests.dygraph.models import LENGTH, MODELS, WIDTH
from tests.pipelines import job, pipeline

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"pp": 2},
    "pp": {"pp": 2},
    "zbv": {"pp": 2, "schedule": "ZBV"},
    "mp": {"mp": 2},
    "dp": {"dp": 2, "micro_batches": 2},
    "sharding": {"sharding": 2, "micro_batches": 2},
}


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
        SharedLayerDesc("embed", tied.Tokens, None, "embedding_weight"),
        LayerDesc(Sliced),
        LayerDesc(nn.LayerNorm, WIDTH),
        LayerDesc(Sliced),
        SharedLayerDesc("embed", tied.Tokens, tied.logits, "embedding_weight"),
    ]


class Run:
    """A model in the current job, and what it is trained with."""

    def __init__(self) -> None:
        paddle.seed(5)
        self.model = pipeline(layers(), loss_fn=tied.loss)
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
            losses[name] = run.train(2)
            manager.wait()
    return losses


def read(home: Path, names: list[str]) -> dict[str, tuple[bool, float]]:
    """Restores what all have saved, under each of the layouts, and saves it again at once.

    Returns whether the files of tensors are the same bytes, and the loss of the third step.
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
                found[f"{name} from {writer}"] = same, run.train(2)
    return found
