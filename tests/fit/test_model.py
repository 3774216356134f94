"""``fleetpipe.Model`` beside ``paddle.Model`` on one device: the same losses, metrics and bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from sklearn.datasets import load_digits

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests import pipelines

STEPS, ROWS = 4, 8
BATCH = STEPS * ROWS


class Digits(paddle.io.Dataset):
    """Some of scikit-learn's digits."""

    def __init__(self, begin: int, end: int) -> None:
        digits = load_digits()
        self.images = (digits.data[begin:end] / 16).astype("float32")
        self.labels = digits.target[begin:end].astype("int64")[:, None]

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)


def layers() -> list[Any]:
    return [
        *(LayerDesc(nn.Linear, 64, 48), nn.functional.relu),
        *(LayerDesc(nn.Linear, 48, 32), nn.functional.relu, LayerDesc(nn.Linear, 32, 10)),
    ]


def prepared(model: Any, **options: Any) -> Any:
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy(topk=(1, 2)), **options)
    return model


class Losses(paddle.callbacks.Callback):
    """Keeps what callbacks are told."""

    def __init__(self) -> None:
        super().__init__()
        self.train: list[Any] = []
        self.eval: list[Any] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.train.append({**logs, "step": step})

    def on_eval_end(self, logs: Any = None) -> None:
        self.eval.append(dict(logs))


def fit(model: Any, *callbacks: Any, data: Any = None, **options: Any) -> Losses:
    """Fits some digits, or other data; returns what callbacks are told."""
    told = Losses()
    data = Digits(0, 4 * BATCH) if data is None else data
    given: Any = {"batch_size": BATCH, "verbose": 0, "callbacks": [*callbacks, told], **options}
    model.fit(data, **given)
    return told


def single(model: Any) -> Any:
    """Builds the single-device model with the weights of a pipeline, under Paddle's own Model."""
    network = model.network.single_model()
    model.network.copy_to(network)
    return network


def micro_batches(data: Digits) -> list[list[Any]]:
    """The micro-batches of all whole batches, as batches of Paddle's Model."""
    starts = range(0, len(data) // BATCH * BATCH, ROWS)
    return [
        [paddle.to_tensor(column[start : start + ROWS]) for column in (data.images, data.labels)]
        for start in starts
    ]


def test_fit_has_the_bits_of_paddles_fit(model: Any) -> None:
    data = Digits(0, 6 * BATCH)
    network = single(model)
    reference = paddle.Model(network)
    criterion = nn.CrossEntropyLoss()
    reference.prepare(
        paddle.optimizer.Adam(0.01, parameters=network.parameters()),
        lambda output, label: criterion(output, label) / STEPS,
        paddle.metric.Accuracy(topk=(1, 2)),
    )
    theirs = Losses()
    options: Any = {"epochs": 2, "shuffle": False, "verbose": 0}
    ours = fit(model, data=data, **options)
    reference.fit(micro_batches(data), callbacks=theirs, accumulate_grad_batches=STEPS, **options)
    shares = np.float32([logs["loss"] for logs in theirs.train]).reshape(-1, STEPS)
    expected = [np.add.accumulate(row)[-1] for row in shares]
    assert [logs["loss"][0] for logs in ours.train] == expected
    for name in ("acc_top1", "acc_top2"):
        ends = [logs[name] for logs in theirs.train[STEPS - 1 :: STEPS]]
        assert [logs[name] for logs in ours.train] == ends
    for mine, other in zip(single(model).parameters(), network.parameters()):
        assert np.array_equal(mine.numpy(), other.numpy())


def test_a_sum_over_micro_batches_is_that_many_times_their_mean() -> None:
    found = []
    for reduction in ("mean", "sum"):
        with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS, loss_reduction=reduction):
            model = fleetpipe.Model(layers())
            sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
            model.prepare(sgd, nn.CrossEntropyLoss())
            data = Digits(0, BATCH)
            before = [parameter.numpy() for parameter in model.parameters()]
            (loss,) = model.train_batch(data.images, data.labels)
            moved = [p.numpy() - old for p, old in zip(model.parameters(), before)]
            found.append((loss, moved))
    (mean, small), (total, large) = found
    assert np.allclose(total, STEPS * mean, rtol=1e-6)
    for one, other in zip(small, large):
        assert np.allclose(other, STEPS * one, rtol=1e-3, atol=1e-6)


def test_a_loss_that_adds_up_rows_fits_as_paddles() -> None:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS, loss_reduction="sum"):
        model = fleetpipe.Model(layers())
        network = single(model)
        reference = paddle.Model(network)
        for fitted, parameters in ((model, model.parameters()), (reference, network.parameters())):
            sgd = paddle.optimizer.SGD(0.001, parameters=parameters)
            fitted.prepare(sgd, nn.CrossEntropyLoss(reduction="sum"))
            data = Digits(0, BATCH + BATCH // 2)
            fitted.fit(data, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        for mine, other in zip(single(model).parameters(), network.parameters()):
            assert np.allclose(mine.numpy(), other.numpy(), rtol=1e-4, atol=1e-6)


# A micro_batch_size that is not that of the data is one that nobody cared about.
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_a_loss_that_is_divided_in_the_end_fits_alike(rows: int) -> None:
    def fitted(delayed: bool) -> tuple[list[float], list[float], list[Any]]:
        strategy = pipelines.strategy(STEPS, rows=rows, pp=2)
        switches = strategy.hybrid_configs["pp_configs"]
        if not hasattr(switches, "delay_scale_loss"):
            pytest.skip("Paddle 2.6.2 has no pp_configs.delay_scale_loss")
        switches.delay_scale_loss = delayed
        fleet.init(is_collective=True, strategy=strategy)
        model = fleetpipe.Model(layers())
        sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        model.prepare(sgd, nn.CrossEntropyLoss())
        told = fit(model, data=Digits(0, 64), shuffle=False)
        losses = [logs["loss"][0] for logs in told.train]
        found = losses, model.micro_batch_losses, [p.numpy() for p in model.parameters()]
        if delayed:
            with pytest.raises(ConfigError, match="drop_last"):
                fit(model, data=Digits(0, BATCH - 1))
        fleet.shutdown()
        return found

    (losses, shares, weights), (others, their_shares, their_weights) = map(fitted, (False, True))
    assert np.allclose(losses, others, rtol=1e-6)
    assert np.allclose(shares, their_shares, rtol=1e-6)
    # Four is a power of two: to divide by it rounds nothing, wherever it is done.
    assert all(map(np.array_equal, weights, their_weights))


def test_evaluation_and_prediction_count_every_row_once(model: Any) -> None:
    data = Digits(0, 2 * BATCH + 5)
    network = single(model)
    network.eval()
    outputs = network(paddle.to_tensor(data.images)).numpy()
    right = outputs.argsort(1)[:, ::-1] == data.labels
    result = model.evaluate(data, batch_size=BATCH, verbose=0)
    assert result["acc_top1"] == right[:, 0].mean()
    assert result["acc_top2"] == right[:, :2].any(1).mean()
    mean = nn.functional.cross_entropy(paddle.to_tensor(outputs), paddle.to_tensor(data.labels))
    assert result["loss"] == [pytest.approx(float(mean), abs=1e-6)]
    (predicted,) = model.predict(data, batch_size=BATCH, stack_outputs=True, verbose=0)
    assert predicted.shape == (len(data), 10)
    assert np.allclose(predicted, outputs, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "accumulate", "steps"),
    [
        (BATCH + 6, 1, [[ROWS] * STEPS, [2, 2, 1, 1]]),
        (3 * BATCH, 2, [[ROWS] * 2 * STEPS, [ROWS] * STEPS]),
    ],
)
def test_a_short_last_batch_counts_by_rows_and_several_make_one_step(
    rows: int, accumulate: int, steps: list[list[int]], model: Any
) -> None:
    data, network = Digits(0, rows), single(model)
    ours = fit(model, data=data, shuffle=False, accumulate_grad_batches=accumulate)
    optimizer = paddle.optimizer.Adam(0.01, parameters=network.parameters())
    images, labels = map(paddle.to_tensor, (data.images, data.labels))
    begin, shares = 0, []
    for sizes in steps:
        for size in sizes:
            part = slice(begin, begin := begin + size)
            loss = nn.functional.cross_entropy(network(images[part]), labels[part])
            loss = loss * (size / min(sum(sizes), BATCH))
            loss.backward()
            shares.append(loss.numpy())
        optimizer.step()
        optimizer.clear_grad()
    totals = np.add.accumulate(np.reshape(shares, (-1, STEPS)), axis=1)[:, -1]
    exact = accumulate > 1  # where all micro-batches have as many rows
    assert np.allclose([logs["loss"][0] for logs in ours.train], totals, 0, 0 if exact else 1e-6)
    assert [logs["step"] for logs in ours.train] == [*range(len(totals))]
    sizes = [BATCH, 6] if accumulate == 1 else [BATCH] * 3
    assert [logs["batch_size"] for logs in ours.train] == sizes
    for mine, other in zip(single(model).parameters(), network.parameters()):
        assert np.allclose(mine.numpy(), other.numpy(), 0, 0 if exact else 1e-6)


# Of two epochs of four batches, and two batches of each evaluation.
@pytest.mark.parametrize(
    ("batches", "evaluated", "accumulate"),
    [
        *((2, False, 1), (2, True, 3), (5, False, 2), (5, True, 1), (7, True, 2)),
        *((7, False, 3), (9, False, 2), (9, True, 3)),
    ],
)
def test_num_iters_ends_where_paddles_model_does(
    batches: int, evaluated: bool, accumulate: int
) -> None:
    def fitted(made: Any, network: Any) -> list[Any]:
        rate, told = paddle.optimizer.lr.StepDecay(0.1, step_size=2), Losses()
        momentum = paddle.optimizer.Momentum(rate, parameters=network.parameters())
        made.prepare(momentum, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
        data = Digits(0, 4 * ROWS - 3), Digits(40, 40 + 2 * ROWS) if evaluated else None
        options: Any = {"num_iters": batches, "accumulate_grad_batches": accumulate}
        for _ in range(2):  # what the first leaves on the parameters is in the second's first step
            made.stop_training = False  # which Paddle's leaves behind
            made.fit(*data, ROWS, 2, verbose=0, callbacks=[told], **options)
        logs = [[each[name] for name in ("step", "loss", "acc")] for each in told.train]
        return [logs, len(told.eval), rate()]

    with pipelines.job(pp=2, micro_batches=1, rows=ROWS):
        model = fleetpipe.Model(layers())
        network = single(model)
        assert fitted(model, model) == fitted(paddle.Model(network), network)
        for mine, other in zip(single(model).parameters(), network.parameters()):
            assert np.array_equal(mine.numpy(), other.numpy())


class TimeFirst(nn.Layer):
    """Gives [positions, rows, channels]."""

    def forward(self, value: Any) -> Any:
        return value.transpose([1, 0, 2])


def test_outputs_that_do_not_begin_with_rows_are_whole_or_refused() -> None:
    class Rows(paddle.metric.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def name(self) -> str:
            return "rows"

        def reset(self) -> None:
            pass

        def update(self, *counts: Any) -> None:
            self.seen += map(int, counts)

        def accumulate(self) -> int:
            return len(self.seen)

        def compute(self, output: Any, label: Any) -> Any:
            return paddle.to_tensor(output.shape[label.shape[1]])

    inputs = paddle.randn([3, 5, 4])
    with pipelines.job(pp=2, micro_batches=2, rows=3):
        model, rows = fleetpipe.Model([nn.Linear(4, 2), TimeFirst()]), Rows()
        model.prepare(None, lambda output, label: (output**2).mean().reshape([1]), rows)
        network = single(model)
        (output,) = model.predict_batch(inputs)
        assert np.array_equal(output, network(inputs).numpy())
        (loss,), _ = model.eval_batch(inputs, paddle.zeros([3, 1]))
        assert loss == float((network(inputs) ** 2).mean())
        assert rows.seen == [3]
        with pytest.raises(ConfigError, match=r"begin with their rows, 6(.|\n)*\[10, 3, 2\]"):
            model.predict_batch(paddle.concat([inputs, inputs]))
        model.prepare(None, None, rows)
        assert model.eval_batch(inputs, paddle.zeros([3, 1])) == ([], [2])
        with pytest.raises(ConfigError, match=r"the metric Rows cannot take(.|\n)*IndexError"):
            model.eval_batch(inputs, paddle.zeros([3, 9]))


class Broken(Digits):
    """The digits, of which one cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == BATCH + 1:
            raise KeyError(f"sample {index} is broken")
        return super().__getitem__(index)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stock", [False, True])
def test_what_the_dataset_raises_ends_fit(model: Any, stock: bool) -> None:
    data, steps = Broken(0, 4 * BATCH), Losses()
    given: Any = paddle.io.DataLoader(data, batch_size=BATCH) if stock else data
    with pytest.raises(KeyError, match="is broken"):
        model.fit(given, batch_size=BATCH, shuffle=False, callbacks=[steps], verbose=0)
    assert len(steps.train) == 1


def test_a_model_needs_a_job_an_optimizer_and_a_loss(model: Any) -> None:
    model = fleetpipe.Model(layers())
    with pytest.raises(StateError, match="prepare"):
        model.fit(Digits(0, 8))
    model.prepare(None, nn.CrossEntropyLoss())
    with pytest.raises(ConfigError, match="optimizer"):
        model.fit(Digits(0, 8))
    fleet.shutdown()
    with pytest.raises(StateError, match="init"):
        fleetpipe.Model(layers())


@pytest.mark.parametrize("rows", [BATCH, BATCH - 3])
def test_a_loss_that_leaves_places_out_weighs_by_tokens(rows: int) -> None:
    """``fit`` calls the loss from a function of its own, which declares what the loss does."""
    numbers = np.random.default_rng(0)
    labels = paddle.to_tensor(numbers.integers(0, 10, (rows, 1)))
    labels[: 2 * ROWS + 3] = 0
    images = paddle.to_tensor(numbers.standard_normal((rows, 64)).astype("float32"))
    sizes = [ROWS, *[(rows - ROWS) // 3] * 3]
    losses: list[list[float]] = []
    for fitted in (True, False):
        with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS, loss_reduction="tokens"):
            paddle.seed(0)
            loss_fn = nn.CrossEntropyLoss(ignore_index=0)
            pipe = PipelineLayer(layers(), num_stages=2, loss_fn=loss_fn)
            sgd = paddle.optimizer.SGD(0.1, parameters=pipe.parameters())
            if fitted:
                model = fleetpipe.Model(pipe)
                model.prepare(sgd, loss_fn)
                losses.append([float(model.train_batch(images, labels)[0]) for _ in range(2)])
            else:
                wrapped, optimizer = fleet.distributed_model(pipe), fleet.distributed_optimizer(sgd)
                batch = [images.split(sizes), labels.split(sizes)]
                losses.append([float(wrapped.train_batch(batch, optimizer)) for _ in range(2)])
    assert losses[0] == losses[1]
