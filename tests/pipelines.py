"""Small models, and jobs for them, that the tests of the engine, of dygraph and of parity share."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.jobs import ROWS as ROWS
from tests.jobs import job as job

FEATURES, CLASSES = 6, 4


def mlp_layers(hidden: int = 8, blocks: int = 3) -> list[Any]:
    """Linear and Tanh layers that end in CLASSES logits; 2 * blocks + 1 entries."""
    layers: list[Any] = []
    width = FEATURES
    for _ in range(blocks):
        layers += [LayerDesc(nn.Linear, width, hidden), nn.functional.tanh]
        width = hidden
    return [*layers, LayerDesc(nn.Linear, width, CLASSES)]


def pipeline(layers: list[Any] | None = None, **options: Any) -> Any:
    """Wraps a PipelineLayer for the current job."""
    topology = fleet.get_hybrid_communicate_group().topology()
    options.setdefault("loss_fn", nn.CrossEntropyLoss())
    return fleet.distributed_model(
        PipelineLayer(layers or mlp_layers(), topology=topology, **options)
    )


def sgd(model: Any, rate: float = 0.1) -> Any:
    """A wrapped SGD over the model's parameters."""
    return fleet.distributed_optimizer(
        paddle.optimizer.SGD(learning_rate=rate, parameters=model.parameters())
    )


def batch(micro_batches: int = 4, seed: int = 0) -> list[Any]:
    """[inputs, labels] of micro_batches x ROWS rows."""
    numbers = np.random.default_rng(seed)
    rows = micro_batches * ROWS
    return [
        paddle.to_tensor(numbers.standard_normal((rows, FEATURES)).astype("float32")),
        paddle.to_tensor(numbers.integers(0, CLASSES, (rows, 1))),
    ]


def bits(state: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of every tensor of a state dict."""
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}
