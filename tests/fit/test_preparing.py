"""What ``Model`` is given: precision, data of every kind; and what it tells of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
import fleetpipe.io
from fleetpipe import log
from fleetpipe.errors import ConfigError
from tests import jobs
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, Losses, layers, prepared


@pytest.fixture
def model() -> Iterator[Any]:
    with jobs.job(pp=2, micro_batches=STEPS, rows=ROWS):
        yield fleetpipe.Model(layers())


def losses(model: Any, data: Any, **options: Any) -> list[float]:
    told = Losses()
    model.fit(data, verbose=0, shuffle=False, callbacks=told, **options)
    return [logs["loss"][0] for logs in told.train]


def test_on_a_cpu_mixed_precision_changes_nothing_and_is_said_once(model: Any, caplog: Any) -> None:
    data = Digits(0, BATCH)
    expected = losses(prepared(model), data, batch_size=BATCH)
    log.once.cache_clear()
    for level in ("O1", {"level": "O2", "init_loss_scaling": 8.0}):
        other = prepared(fleetpipe.Model(layers()), amp_configs=level)
        assert losses(other, data, batch_size=BATCH) == expected
    assert caplog.text.count("auto_cast changes nothing") == 1


@pytest.mark.parametrize("configs", ["O3", {"level": "O3"}, {"loss_scale": 1}])
def test_what_paddle_does_not_take_as_precision_is_refused(model: Any, configs: Any) -> None:
    with pytest.raises(ConfigError, match="amp_configs: "):
        prepared(model, amp_configs=configs)


def test_the_summary_counts_parameters_and_measures_memory(model: Any, capsys: Any) -> None:
    prepared(model)
    data = Digits(0, BATCH)
    before = [value.numpy() for value in model.network.full_state_dict().values()]
    counts = model.summary(batch=(data.images, data.labels))
    assert counts == {"total_params": 5018, "trainable_params": 5018}
    title, heads, first, last, total = capsys.readouterr().out.splitlines()
    assert title == "seg_method uniform: 5 layers, stages: 2; parameters that are trained"
    assert heads.endswith("bytes of activations")
    assert "3,120" in first
    assert "1,898" in last
    assert "5,018" in total
    after = [value.numpy() for value in model.network.full_state_dict().values()]
    assert all(map(np.array_equal, before, after))


class Stream(paddle.io.IterableDataset):
    """Digits in turn."""

    def __iter__(self) -> Iterator[Any]:
        data = Digits(0, 3 * BATCH)
        yield from (data[index] for index in range(len(data)))


def test_data_of_every_kind_train_alike(model: Any) -> None:
    data = Digits(0, 3 * BATCH)
    batches = [
        (data.images[begin : begin + BATCH], data.labels[begin : begin + BATCH])
        for begin in range(0, 3 * BATCH, BATCH)
    ]
    expected = losses(prepared(model), data, batch_size=BATCH)
    assert len(expected) == 3
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (Stream(), {"batch_size": BATCH}),
        (batches, {}),
        ((batch for batch in batches), {}),
        (paddle.io.DataLoader(data, batch_size=BATCH), {}),
        (data, {"batch_size": BATCH, "num_workers": 2}),
        (fleetpipe.io.DataLoader(data, batch_size=BATCH, num_workers=1), {}),
    ]
    for kind, options in kinds:
        again = prepared(fleetpipe.Model(layers()))
        assert losses(again, kind, **options) == expected, kind


def test_longer_steps_and_a_trace_do_not_go_together(tmp_path: Any) -> None:
    with jobs.job(pp=2, micro_batches=STEPS, rows=ROWS, trace=str(tmp_path)):
        model = prepared(fleetpipe.Model(layers()))
        with pytest.raises(ConfigError, match="trace"):
            losses(model, Digits(0, BATCH), batch_size=BATCH, accumulate_grad_batches=2)


def test_a_schedule_of_the_learning_rate_steps_with_batches(model: Any) -> None:
    rate = paddle.optimizer.lr.StepDecay(0.1, step_size=2)
    model.prepare(paddle.optimizer.SGD(rate, model.parameters()), nn.CrossEntropyLoss())
    losses(model, Digits(0, 3 * BATCH), batch_size=BATCH)
    assert model.learning_rate == 0.1 * 0.1
    by_epoch = paddle.callbacks.LRScheduler(by_step=False, by_epoch=True)
    model.fit(Digits(0, 3 * BATCH), batch_size=BATCH, verbose=0, callbacks=by_epoch)
    assert rate.last_epoch == 3 + 1
    plateau = paddle.optimizer.lr.ReduceOnPlateau(0.1)
    model.prepare(paddle.optimizer.SGD(plateau, model.parameters()), nn.CrossEntropyLoss())
    for callbacks in (None, by_epoch):
        with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
            model.fit(Digits(0, BATCH), batch_size=BATCH, verbose=0, callbacks=callbacks)
    by_hand = paddle.callbacks.LRScheduler(by_step=False)
    model.fit(Digits(0, BATCH), batch_size=BATCH, verbose=0, callbacks=by_hand)
