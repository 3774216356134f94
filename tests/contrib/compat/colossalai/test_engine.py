"""A program of ColossalAI's: what it configures, and its engine's batches beside plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.vision.models.resnet import BasicBlock

from fleetpipe.contrib.compat.colossalai import (
    ParallelMode,
    PipelinableContext,
    get_dataloader,
    gpc,
    initialize,
    launch_from_torch,
)
from fleetpipe.contrib.compat.colossalai.context import Config
from fleetpipe.contrib.compat.colossalai.nn.lr_scheduler import LinearWarmupLR
from fleetpipe.errors import ConfigError, StateError, UsageError
from tests.pipelines import accumulate, bits

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


def test_a_mapping_and_a_file_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(
        "BATCH_SIZE = 64\nNUM_MICRO_BATCHES = 4\nparallel = dict(pipeline=dict(size=2), tensor=1)\n"
    )
    for given in (
        str(file),
        {"NUM_MICRO_BATCHES": 4, "BATCH_SIZE": 64, "parallel": {"pipeline": 2}},
    ):
        config = Config.read(given)
        assert (config.NUM_MICRO_BATCHES, config.degree("pipeline")) == (4, 2)
        assert config.BATCH_SIZE == 64
    assert Config.read({}).degree("pipeline") == 1
    # A program's own.
    assert Config.read({"NUM_EPOCHS": 2, "NUM_BATCHES": 9, "MICRO_BATCH_SIZE": 4}).NUM_EPOCHS == 2
    with pytest.raises(AttributeError):
        print(config.SIZE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"NUM_MICRO_BATCHES": 0}, "NUM_MICRO_BATCHES must be a whole number"),
        ({"NUM_MICRO_BATCHES": True}, "NUM_MICRO_BATCHES must be a whole number"),
        ({"NUM_CHUNKS": 1.5}, "NUM_CHUNKS must be a whole number"),
        ({"parallel": {"pipeline": "2"}}, r"parallel\['pipeline'\] must be a whole number"),
        ({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, "mp_degree of fleetpipe.fleet"),
        ({"NUM_MICROBATCHES": 4}, "no entry 'NUM_MICROBATCHES'\n.* mean 'NUM_MICRO_BATCHES'"),
        ({"TENSORSHAPE": (4, 2)}, "did you mean 'TENSOR_SHAPE'"),
        ({"parallel": {"pipelines": 2}}, "parallel has no entry 'pipelines'"),
        ({"fp16": {"mode": "naive"}}, "fp16 is not configured here"),
        ({"clip_grad_norm": 1.0}, "grad_clip=paddle.nn.ClipGradByGlobalNorm"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launch_from_torch(config)


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(UsageError, match="a mapping or the path"):
        launch_from_torch(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [{}, {"NUM_CHUNKS": 2}, {"SCHEDULE": "GPipe"}])
def test_batches_train_as_the_plain_model_does(config: Any) -> None:
    with launched(**config):
        model = partitioned(recorded(), gpc.config.get("NUM_CHUNKS", 1))
        plain = ResNet()
        model.copy_to(plain)
        engine = engine_of(model)
        engine.train()
        losses = []
        for step in range(2):
            engine.zero_grad()
            output, label, loss = engine.execute_schedule(iter([batch(step)]))
            engine.step()
            losses.append(loss.numpy().tobytes())
            assert output.shape == [ROWS, 10]
            assert label.numpy().tobytes() == batch(step)[1].numpy().tobytes()
        alone = trained_alone(plain, 2)
        assert losses == [loss.numpy().tobytes() for loss in alone]
        assert bits(model.state_dict()) == bits(plain.state_dict())


def test_evaluation_returns_the_outputs_in_order_and_changes_nothing() -> None:
    with launched():
        model = partitioned(recorded())
        plain = ResNet()
        model.copy_to(plain)
        engine = engine_of(model)
        engine.eval()
        plain.eval()
        before = bits(model.state_dict())
        # Any number of rows: 5 are micro-batches of 2, 2 and 1.
        data = batch(3, rows=5)
        output, _, loss = engine.execute_schedule(iter([data]), forward_only=True)
        expected = paddle.concat([plain(data[0][a : a + 2]) for a in (0, 2, 4)])
        assert output.numpy().tobytes() == expected.numpy().tobytes()
        assert float(loss) == pytest.approx(
            float(nn.functional.cross_entropy(expected, data[1])), rel=1e-6
        )
        assert bits(model.state_dict()) == before
        again = engine.execute_schedule(iter([data]), forward_only=True, return_loss=False)
        assert again[0].numpy().tobytes() == output.numpy().tobytes()
        assert again[2] is None
        told = engine.execute_schedule(iter([data]), True, return_output_label=False)
        assert told[:2] == (None, None)
        assert float(told[2]) == float(loss)


def test_what_does_not_fit_is_refused() -> None:
    with launched():
        engine = engine_of(partitioned(recorded()))
        with pytest.raises(ConfigError, match=r"\(=4\) does not divide the 66 rows"):
            engine.execute_schedule(iter([batch(0, rows=66)]))
        with pytest.raises(ConfigError, match="a batch that trains has a loss"):
            engine.execute_schedule(iter([batch(0)]), return_loss=False)
        with pytest.raises(StateError, match=r"the engine is set to train"):
            engine.execute_schedule(iter([batch(0)]), forward_only=True)
        for data in (iter([]), iter([batch(0)[0]]), iter([[*batch(0), 1]])):
            with pytest.raises(UsageError):
                engine.execute_schedule(data)
        engine.execute_schedule(iter([batch(0)]))
        with pytest.raises(StateError, match="the batch before are still there"):
            engine.execute_schedule(iter([batch(0)]))
        engine.eval()
        with pytest.raises(StateError, match="set to evaluate"):
            engine.execute_schedule(iter([batch(0)]))
        with pytest.raises(UsageError, match="got: ResNet"):
            initialize(ResNet(), None, nn.CrossEntropyLoss())


def test_the_learning_rate_of_the_tutorial() -> None:
    def rates(total: int, warmup: int) -> list[float]:
        adam = paddle.optimizer.Adam(1e-3, parameters=nn.Linear(1, 1).parameters())
        scheduler = LinearWarmupLR(adam, total, warmup)
        found = []
        for _ in range(total):
            found.append(adam.get_lr())
            scheduler.step()
        return found

    assert rates(2, 1) == pytest.approx([0.0005, 0.001], abs=1e-12)
    expected = [1e-3 * (e + 1) / 4 if e < 3 else 1e-3 * (10 - e) / 7 for e in range(10)]
    assert rates(10, 3) == pytest.approx(expected, abs=1e-12)


def test_a_loader_gives_this_replicas_batches() -> None:
    with launched():
        dataset = paddle.io.TensorDataset([paddle.arange(10), paddle.arange(10)])
        loader = get_dataloader(dataset, batch_size=4)
        assert [rows.tolist() for rows, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        kept = get_dataloader(dataset, shuffle=True, drop_last=False, batch_size=4, pin_memory=True)
        first, second = ([row for rows, _ in kept for row in rows.tolist()] for _ in range(2))
        assert first != second
        assert sorted(first) == sorted(second) == list(range(10))
        assert len(kept) == 3
