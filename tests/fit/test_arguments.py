"""What newcomers give a ``Model`` and its methods: other forms of the same, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.errors import ConfigError
from fleetpipe.fit.micro_batches import batch_from_item
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests import pipelines
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, Losses, prepared

Model = Any


def fitted(**options: Any) -> Callable[[Model], Any]:
    given = {"batch_size": BATCH, "verbose": 0, **options}
    return lambda model: model.fit(given.pop("data", Digits(0, BATCH)), **given)


def loss_of(loss: Any) -> Callable[[Model], Any]:
    return lambda model: model.prepare(None, loss)


def metric_of(metric: Any) -> Callable[[Model], Any]:
    return lambda model: model.prepare(None, nn.CrossEntropyLoss(), metric)


MISUSE: list[tuple[Callable[[Model], Any], str]] = [
    (loss_of(nn.CrossEntropyLoss), r"pass CrossEntropyLoss\(\)"),
    (loss_of("ce"), "a function or a built layer"),
    (metric_of(paddle.metric.Accuracy), r"pass Accuracy\(\)"),
    (metric_of(["acc"]), "'acc' without compute, update"),
    (lambda model: model.prepare("adam"), "one of Paddle's"),
    (fitted(data=None), "no data"),
    (fitted(data=5), "got: int"),
    (fitted(data=Digits(0, 0)), "0 rows and batch_size=32"),
    (fitted(data=[]), "an empty list"),
    (fitted(data=iter([Digits(0, BATCH)[:]]), epochs=2), "used up by one pass"),
    (fitted(data=Digits(0, 5), drop_last=True), "drop_last=False"),
    (fitted(batch_size=None), "batch_size=None"),
    (fitted(batch_size=(8, 8, 8)), "a pair for training and evaluation"),
    (fitted(epochs="2"), "epochs='2'"),
    (fitted(eval_freq=0), "eval_freq=0"),
    (fitted(save_freq=0), "save_freq=0"),
    (fitted(log_freq=0), "log_freq=0"),
    (fitted(accumulate_grad_batches=0), "accumulate_grad_batches=0"),
    (fitted(num_iters=-1), "num_iters=-1"),
    (fitted(num_workers=-1), "num_workers=-1"),
    (fitted(callbacks=[Losses]), r"pass Losses\(\.\.\)"),
    (fitted(callbacks=[print]), "an object of paddle.callbacks.Callback"),
]


def test_what_does_not_fit_is_refused_by_name(model: Model) -> None:
    for attempt, said in MISUSE:
        with pytest.raises(ConfigError, match=said):
            attempt(model)
    # Nothing of it is left.
    fitted()(prepared(model))


def test_a_folder_that_cannot_be_written_is_named(model: Model, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fleetpipe.errors.CheckpointError, match="file/run"):
        fitted(save_dir=str(tmp_path / "file" / "run"))(model)


class Named(nn.Layer):
    """Its outputs have names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(48, 10)

    def forward(self, value: Any) -> Any:
        return {"logits": self.inner(value), "mean": value.mean(axis=1)}


class NamedAccuracy(paddle.metric.Accuracy):
    """Looks at one of them."""

    def compute(self, pred: Any, label: Any, *args: Any) -> Any:
        return super().compute(pred["logits"], label)


def test_outputs_may_be_named() -> None:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS):
        model = fleetpipe.Model([LayerDesc(nn.Linear, 64, 48), LayerDesc(Named)])
        sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        loss = nn.CrossEntropyLoss()
        model.prepare(sgd, lambda output, label: loss(output["logits"], label), NamedAccuracy())
        data = Digits(0, BATCH + 5)
        fitted(data=data)(model)
        assert 0 <= model.evaluate(data, batch_size=BATCH, verbose=0)["acc"] <= 1
        logits, means = model.predict(data, batch_size=BATCH, stack_outputs=True, verbose=0)
        assert (logits.shape, means.shape) == ((BATCH + 5, 10), (BATCH + 5,))


def test_entries_of_a_dict_come_in_the_order_that_paddle_gives_them() -> None:
    sample = {"label": np.zeros((2, 1), "int64"), "image": np.ones((2, 3), "float32")}
    expected = [list(column.shape) for column in paddle.utils.flatten(sample)]
    rows = batch_from_item(sample, 1, 0, 1, None)
    assert [column.shape for column in (*rows.inputs, *rows.labels)] == expected == [[2, 3], [2, 1]]
