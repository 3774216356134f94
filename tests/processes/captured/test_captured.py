"""Ranks that have a part of a captured model each get what one process with all of it gets."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import core

import fleetpipe
from fleetpipe import fleet
from tests import byhand
from tests.capture.models import IMAGE_CLASSES, images
from tests.pipelines import begin, momentum


class Tied(nn.Layer):  # type: ignore[misc]
    """A classifier whose first weight is used by the last operation too, as glue."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2D(3, 8, 3), nn.BatchNorm2D(8), nn.ReLU())
        self.embed = nn.Linear(IMAGE_CLASSES, 8)
        self.body = nn.Linear(8, 8)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        features = self.features(x).mean([2, 3]) + self.embed(paddle.eye(IMAGE_CLASSES)[:1])
        return paddle.matmul(self.body(features), self.embed.weight, transpose_y=True)


class Wide(nn.Layer):  # type: ignore[misc]
    """Blocks whose parameters are nearly all that it needs memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([nn.Linear(512, 512) for _ in range(12)])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def lazily() -> dict[str, Any]:
    """Trains a model that is nowhere whole, and tells the peak of the memory of tensors."""
    with paddle.LazyGuard():
        plain = Wide()
    numbers = np.random.default_rng(0).standard_normal((8, 512)).astype("float32")
    x = paddle.to_tensor(numbers)
    # The first batches would be trained beside the whole model otherwise.
    pipe = fleetpipe.pipeline(plain, x[:2], nn.MSELoss(), split_spec=["blocks.6"], verify=True)
    model = fleet.distributed_model(pipe)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(parameters=pipe.parameters()))
    losses = [float(model.train_batch([x, x], optimizer)) for _ in range(2)]
    # Another number of columns cannot be, of rows it can: the forward is captured anew.
    predicted = digest({"": model.predict_batch(x[:3])})
    peak = core.host_memory_stat_peak_value("Allocated", 0)
    proof = None if pipe.proof is None else str(pipe.proof)
    own = digest(pipe.state_dict())
    return {"losses": losses, "predicted": predicted, "own": own, "peak": peak, "proof": proof}


def digest(tensors: dict[str, Any]) -> dict[str, str]:
    return {name: sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def told(build: Any, split_spec: Any, size: int, folder: Path) -> dict[str, Any]:
    """Trains, evaluates, predicts, saves and loads, and says what came of it."""
    # Other weights on other ranks: those of a stage count, and a tied one is its first holder's.
    paddle.seed(7)
    data = images(8, size)
    pipe = fleetpipe.pipeline(
        build(), data[0][:2], nn.CrossEntropyLoss(), split_spec=split_spec, verify=False
    )
    model = fleet.distributed_model(pipe)
    optimizer = momentum(pipe)
    losses = [float(model.train_batch(data, optimizer)) for _ in range(2)]
    loss = model.eval_batch([part[:5] for part in data], compute_loss=True)
    own = digest(pipe.state_dict())
    predicted = digest({"": model.predict_batch(data[0][:5])})
    whole = digest(pipe.full_state_dict())
    # The first replica writes, and the others would have to wait for it.
    pipe.save_state_dict(folder)
    reloaded = own
    if fleet.get_hybrid_communicate_group().get_data_parallel_rank() == 0:
        for tensor in pipe.state_dict().values():
            tensor.set_value(paddle.zeros_like(tensor))
        pipe.set_state_dir(folder)
        reloaded = digest(pipe.state_dict())
    return {
        "losses": losses,
        "evaluated": float(loss),
        "predicted": predicted,
        "own": own,
        "whole": whole,
        "reloaded": reloaded == own,
        "edges": [str(edge) for edge in pipe.owned_stages.edges(training=True)],
    }


def everything(folder: Path, dp: int) -> dict[str, Any]:
    """Runs all cases in a job of two stages."""
    begin(2, dp=dp)
    found = {
        # First, for the peak.
        "lazily": lazily(),
        "resnet18": told(
            lambda: paddle.vision.models.resnet18(num_classes=IMAGE_CLASSES),
            ["layer3"],
            32,
            folder / "resnet18",
        ),
        "tied": told(Tied, ["body"], 8, folder / "tied"),
    }
    fleet.shutdown()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone")
    # In a process of its own, for the peak of its memory.
    (found,) = byhand.call(everything, None, folder, 1, folder=folder)
    return found


@pytest.mark.once_for("2")
@pytest.mark.parametrize("dp", [1, 2])
def test_ranks_get_what_one_process_gets(
    on_ranks: Callable[..., Any], tmp_path: Path, alone: Any, dp: int
) -> None:
    ranks = on_ranks(everything, 2 * dp, tmp_path, dp)
    for found in ranks:
        assert found["resnet18"]["reloaded"]
        assert found["tied"]["reloaded"]
        # Each has the parameters and statistics of its stage, by the names of the plain model.
        own = found["resnet18"].pop("own")
        assert len(own) in (50, 52)
        assert own.items() <= alone["resnet18"]["own"].items()
        expected = alone["resnet18"].items()
        assert found["resnet18"] == {key: value for key, value in expected if key != "own"}
    lazy, whole = [found["lazily"] for found in ranks], alone["lazily"]
    assert whole["proof"].startswith("equal in bits: 10 outputs, 24 gradients, 0 buffers")
    for part in lazy:
        # The first values do not depend on who draws them.
        assert (part["losses"], part["predicted"]) == (whole["losses"], whole["predicted"])
        assert len(part["own"]) == 12
        assert part["own"].items() <= whole["own"].items()
        # Replicas need as much again as the gradients, to add them up.
        assert part["peak"] <= (0.6 if dp == 1 else 0.75) * whole["peak"]
        assert part["proof"] is None
    tied = [found["tied"] for found in ranks]
    assert [len(found["own"]) for found in tied] == [10, 3] * dp
    # Each stage adds up its own uses of the weight first: the copies are equal, to rounding alone.
    assert len({found["own"]["embed.weight"] for found in tied}) == 1
    for found in tied:
        assert found["losses"] == pytest.approx(alone["tied"]["losses"], rel=1e-6)
        assert found["losses"][0] == alone["tied"]["losses"][0]
        assert found["edges"] == ["0>1"]
