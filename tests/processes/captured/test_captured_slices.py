"""Captured models with shards of weights, or of the optimizer's state, train as one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.pipelines import adamw, begin, job

pytestmark = pytest.mark.once

WORDS, WIDTH = 12, 8


class Block(nn.Layer):  # type: ignore[misc]
    """A feed-forward whose weights are slices, around a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 16, gather_output=False, has_bias=True)
        self.down = RowParallelLinear(16, WIDTH, input_is_parallel=True, has_bias=True)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Language(nn.Layer):  # type: ignore[misc]
    """A plain model, with glue between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(WORDS, WIDTH)
        self.blocks = nn.LayerList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * 1.5
        return self.head(x)


def loss_fn(output: Any, labels: Any) -> Any:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def told(split_spec: Any, folder: Path) -> dict[str, Any]:
    """Trains three steps in the current job, and says what came of it."""
    numbers = np.random.default_rng(0)
    ids, labels = (paddle.to_tensor(numbers.integers(0, WORDS, (8, 5))) for _ in range(2))
    paddle.seed(7)
    pipe = fleetpipe.pipeline(Language(), ids[:2], loss_fn, split_spec)
    start = {name: tensor.numpy() for name, tensor in pipe.full_state_dict().items()}
    model = fleet.distributed_model(pipe)
    optimizer = adamw(pipe)
    losses = [float(model.train_batch([ids, labels], optimizer)) for _ in range(3)]
    state = pipe.full_state_dict()
    pipe.load_from(state)
    pipe.save_state_dict(folder)
    return {
        "start": start,
        "losses": losses,
        "evaluated": float(model.eval_batch([ids, labels], compute_loss=True)),
        "state": {name: tensor.numpy() for name, tensor in state.items()},
        "cut": pipe.segment_parts,
        "proof": str(pipe.proof),
    }


def on_axis(folder: Path, axis: str) -> dict[str, Any]:
    """Trains on two stages and two ranks along an axis."""
    begin(2, rows=2, **{axis: 2})
    found = told("auto" if axis == "mp" else ["blocks.2"], folder / "layers")
    fleet.shutdown()
    return found


PROOF = (
    "equal in bits: 10 outputs, 27 gradients, 0 buffers; trained 2 steps of 4 micro-batches under "
    "1F1B, evaluated 2 and 3 rows"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with job(2, rows=2):
        return told(["blocks.2"], tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("axis", "tolerance"), [("mp", 1e-6), ("sharding", 0.0)])
def test_a_captured_model_trains_to_the_same_numbers(
    on_ranks: Callable[..., Any], tmp_path: Path, alone: Any, axis: str, tolerance: float
) -> None:
    ranks = on_ranks(on_axis, 4, tmp_path, axis)
    for found in ranks:
        # Each rank measures by its own clock, and takes what one of them measured.
        assert found["cut"] == ranks[0]["cut"]
        assert found["proof"] == alone["proof"] == PROOF
        assert found["start"].keys() == alone["start"].keys()
        for name, value in found["start"].items():
            assert np.array_equal(value, alone["start"][name]), name
        # The slices of a product are added up: with them only rounding is the same.
        for what in ("losses", "evaluated"):
            assert np.allclose(found[what], alone[what], rtol=tolerance, atol=0)
        for name, values in found["state"].items():
            assert np.allclose(values, alone["state"][name], rtol=0, atol=10 * tolerance), name
    # An embedding, four blocks of three, and a head; of each slice.
    assert len(list((tmp_path / "layers").glob("layer*"))) == 14 * (2 if axis == "mp" else 1)
