"""A program of ColossalAI's, small, as the tests run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.vision.models.resnet import BasicBlock

from fleetpipe.contrib.compat.colossalai import (
    ParallelMode,
    PipelinableContext,
    gpc,
    initialize,
    launch_from_torch,
)
from tests.pipelines import accumulate

ROWS = 8
NAMES = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"]


def flatten(x: Any) -> Any:
    return paddle.flatten(x, 1)


EXEC_SEQ: list[Any] = [*NAMES, (flatten, "behind"), "fc"]


def block(channels: int, out: int) -> Any:
    """A block of Paddle's own that halves the image."""
    shortcut = nn.Sequential(nn.Conv2D(channels, out, 1, 2, bias_attr=False), nn.BatchNorm2D(out))
    return BasicBlock(channels, out, 2, shortcut)


class ResNet(nn.Layer):
    """A small network with the children of a ResNet, made in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2D(3, 8, 3, padding=1, bias_attr=False)
        self.bn1 = nn.BatchNorm2D(8)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2D(2)
        self.layer1 = BasicBlock(8, 8)
        self.layer2 = block(8, 16)
        self.layer3 = block(16, 32)
        self.layer4 = block(32, 64)
        self.avgpool = nn.AdaptiveAvgPool2D(1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(flatten(self.avgpool(x)))


def recorded(make: Any = ResNet, exec_seq: Any = EXEC_SEQ, policy: Any = "balanced") -> Any:
    """A context in which a model was made and listed."""
    pipelinable = PipelinableContext(policy)
    with pipelinable:
        # Kept while its layers are noted, as a program keeps it.
        model = make()
    assert model is not None
    pipelinable.to_layer_list(exec_seq)
    return pipelinable


@contextmanager
def launched(**config: Any) -> Iterator[Any]:
    """A job of the program's; ``parallel`` is two ranks and there are 4 micro-batches."""
    usual = {"NUM_MICRO_BATCHES": 4, "parallel": {"pipeline": 2}}
    launch_from_torch({**usual, **config}, verbose=False)
    try:
        yield gpc.config
    finally:
        gpc.destroy()


def partitioned(pipelinable: Any, chunks: int = 1) -> Any:
    """This process's stages."""
    rank = gpc.get_local_rank(ParallelMode.PIPELINE)
    return pipelinable.partition(chunks, gpc.pipeline_parallel_size, rank)


def engine_of(model: Any, criterion: Any = None, rate: float = 0.05) -> Any:
    """An engine with Momentum."""
    momentum = paddle.optimizer.Momentum(rate, 0.9, parameters=model.parameters())
    return initialize(model, momentum, criterion or nn.CrossEntropyLoss(), verbose=False)[0]


def batch(seed: int, rows: int = ROWS, size: int = 16) -> list[Any]:
    """Images [rows, 3, size, size] and labels [rows, 1]."""
    numbers = np.random.default_rng(seed)
    images = numbers.standard_normal((rows, 3, size, size)).astype("float32")
    return [paddle.to_tensor(images), paddle.to_tensor(numbers.integers(0, 10, (rows, 1)))]


def trained_alone(model: Any, steps: int, micro_batches: int = 4, rate: float = 0.05) -> list[Any]:
    """Trains a plain model on the same micro-batches; returns its losses."""
    model.train()
    momentum = paddle.optimizer.Momentum(rate, 0.9, parameters=model.parameters())
    losses = []
    for step in range(steps):
        parts = zip(*(part.chunk(micro_batches) for part in batch(step)))
        entropy = nn.functional.cross_entropy
        losses.append(accumulate(entropy(model(x), y) / micro_batches for x, y in parts))
        momentum.step()
        momentum.clear_grad()
    return losses
