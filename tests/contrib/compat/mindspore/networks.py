"""Networks with stages on their sublayers, as the tests of compat.mindspore train them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle.nn import CrossEntropyLoss, Linear

from fleetpipe import fleet
from fleetpipe.contrib.compat.mindspore import Model, ParallelMode, context, nn

ROWS = 8


class Net(nn.Cell):
    """Two linear layers, with glue between them that has no stage."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Linear(4, 6)
        self.tail = Linear(6, 3)
        self.head.pipeline_stage = 0
        self.tail.pipeline_stage = 1

    def construct(self, x: Any) -> Any:
        x = paddle.tanh(self.head(x))
        return self.tail(x * 2)


class TiedNet(nn.Cell):
    """An embedding whose table is used again in the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = paddle.nn.Embedding(5, 4)
        self.inner = Linear(4, 4)
        self.embed.pipeline_stage = 0
        self.inner.pipeline_stage = 1

    def construct(self, x: Any) -> Any:
        x = self.inner(self.embed(x))
        return paddle.matmul(x, self.embed.weight, transpose_y=True)


@contextmanager
def stages(count: int = 2, **options: Any) -> Iterator[None]:
    """Options of a pipeline; the job of them ends with it."""
    context.reset_auto_parallel_context()
    context.set_auto_parallel_context(
        parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL, pipeline_stages=count, **options
    )
    try:
        yield
    finally:
        fleet.shutdown()
        context.reset_auto_parallel_context()


def model_of(net: Any, micro_size: int = 4, rate: float = 0.05, loss: Any = None) -> Any:
    """A model that trains a network by Momentum."""
    cell = nn.PipelineCell(nn.WithLossCell(net, loss or CrossEntropyLoss()), micro_size)
    parameters = nn.infer_param_pipeline_stage(net)
    return Model(cell, optimizer=paddle.optimizer.Momentum(rate, 0.9, parameters=parameters))


def batches(count: int, rows: int = ROWS) -> list[Any]:
    """Batches (inputs [rows, 4], labels [rows, 1])."""
    found = []
    for seed in range(count):
        numbers = np.random.default_rng(seed)
        inputs = numbers.standard_normal((rows, 4)).astype("float32")
        labels = numbers.integers(0, 3, (rows, 1))
        found.append((paddle.to_tensor(inputs), paddle.to_tensor(labels)))
    return found


def words(count: int) -> list[Any]:
    """Batches (words [4, 2], the words that follow)."""
    rows = paddle.to_tensor([[0, 1], [2, 3], [4, 4], [1, 0]])
    return [((rows + step) % 5, (rows + step + 1) % 5) for step in range(count)]
