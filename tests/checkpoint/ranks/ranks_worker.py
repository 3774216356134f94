"""Layouts of a job, one after another: each writes a checkpoint, and reads those of all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.checkpoint.files import tensors
from fleetpipe.errors import CheckpointError
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from tests.dygraph import tied
from tests.dygraph.models import LENGTH, MODELS, WIDTH
from tests.pipelines import bits, job, pipeline

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
