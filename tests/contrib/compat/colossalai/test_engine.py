"""The engine's batches against a plain model's, and what it refuses."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.contrib.compat.colossalai import get_dataloader, gpc, initialize
from fleetpipe.contrib.compat.colossalai.nn.lr_scheduler import LinearWarmupLR
from fleetpipe.errors import ConfigError, StateError, UsageError
from tests.contrib.compat.colossalai.programs import (
    ROWS,
    ResNet,
    batch,
    engine_of,
    launched,
    partitioned,
    recorded,
    trained_alone,
)
from tests.pipelines import bits


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
        kept = get_dataloader(dataset, shuffle=True, drop_last=False, batch_size=4)
        assert sorted(int(row) for rows, _ in kept for row in rows) == list(range(10))
        assert len(kept) == 3
