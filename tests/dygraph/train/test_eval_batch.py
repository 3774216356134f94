"""``eval_batch`` and ``predict_batch``: any rows, with or without loss, and training unharmed."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import (
    CLASSES,
    FEATURES,
    ROWS,
    batch,
    bits,
    job,
    mlp_layers,
    model_in_job,
    pipeline,
    sgd,
    train,
)


def rows_of(count: int, seed: int = 3) -> list[Any]:
    """[inputs, labels] of any number of rows, labels of one dimension."""
    numbers = np.random.default_rng(seed)
    return [
        paddle.to_tensor(numbers.standard_normal((count, FEATURES)).astype("float32")),
        paddle.to_tensor(numbers.integers(0, CLASSES, count)),
    ]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBV"])
@pytest.mark.parametrize(
    "evaluate",
    [
        lambda model: model.eval_batch(batch(seed=9), compute_loss=True),
        lambda model: model.eval_batch(batch(seed=9)),
        lambda model: model.eval_batch([batch(seed=9)[0], None]),
        lambda model: model.eval_batch(rows_of(13), compute_loss=True),
        lambda model: model.predict_batch(rows_of(3)[0]),
    ],
)
def test_evaluation_first_and_between_leaves_training_as_it_was(
    evaluate: Any, schedule: str
) -> None:
    def evaluate_first(model: Any) -> None:
        assert model.layers.training  # as a step leaves it
        evaluate(model)

    assert train(schedule=schedule, each_step=evaluate_first) == train(schedule=schedule)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 8, 13])
def test_any_number_of_rows_gives_the_loss_and_outputs_of_the_whole(ranks: int, rows: int) -> None:
    inputs, labels = rows_of(rows)
    with model_in_job(ranks, 4) as model:
        loss = model.eval_batch([inputs, labels], compute_loss=True)
        outputs = model.eval_batch([inputs, labels])
        prediction = model.predict_batch(inputs)
        model.layers.eval()
        whole = model.layers(inputs)
        expected = nn.functional.cross_entropy(whole, labels)
    sizes = [ROWS] * 4 if rows == 8 else [ROWS] * (rows // ROWS) + [1] * (rows % ROWS)
    assert [output.shape[0] for output in outputs] == sizes
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert loss.shape == []
    assert np.allclose(prediction.numpy(), whole.numpy(), rtol=1e-6, atol=1e-7)
    assert (paddle.concat(outputs).numpy() == prediction.numpy()).all()


def test_the_sum_of_an_incomplete_batch_is_the_sum() -> None:
    with job(2, 4, loss_reduction="sum"):
        model = pipeline(loss_fn=nn.CrossEntropyLoss(reduction="sum"))
        inputs, labels = rows_of(7)
        loss = model.eval_batch([inputs, labels], compute_loss=True)
        whole = nn.functional.cross_entropy(model.layers(inputs), labels, reduction="sum")
        assert float(loss) == pytest.approx(float(whole), rel=1e-6)


def test_lists_of_any_length_are_evaluated() -> None:
    with model_in_job(2, 4) as model:
        parts = [rows_of(rows, seed=rows) for rows in (3, 1)]
        data = [[inputs for inputs, _ in parts], [labels for _, labels in parts]]
        loss = model.eval_batch(data, compute_loss=True)
        single = [
            float(nn.functional.cross_entropy(model.layers(inputs), labels))
            for inputs, labels in parts
        ]
        assert float(loss) == pytest.approx(sum(single) / 2, rel=1e-6)
        assert len(model.eval_batch([data[0], None])) == 2


def test_an_iterator_gives_accumulate_steps_items() -> None:
    with model_in_job(2, 4) as model:
        items = iter([rows_of(2, seed=k) for k in range(9)])
        assert len(model.eval_batch(items)) == 4
        model.eval_batch(items, compute_loss=True)
        assert len(list(items)) == 1


def test_the_loss_of_evaluation_is_that_of_training() -> None:
    with model_in_job(2, 4) as model:
        evaluated = model.eval_batch(batch(), compute_loss=True)
        assert evaluated.numpy() == model.train_batch(batch(), sgd(model)).numpy()
        assert evaluated.stop_gradient


def test_several_losses_are_a_list_and_need_a_right_index() -> None:
    def second(output: Any, label: Any) -> Any:
        return output.mean()

    with model_in_job(2, 4, loss_fn=[nn.functional.cross_entropy, second]) as model:
        first, other = model.eval_batch(batch(), compute_loss=True, loss_fn_idx=1)
        assert float(other) == pytest.approx(float(model.layers(batch()[0]).mean()), rel=1e-5)
        assert first.shape == other.shape == []
        with pytest.raises(ConfigError, match="no loss function 2"):
            model.eval_batch(batch(), compute_loss=True, loss_fn_idx=2)


def test_dropout_and_batch_norm_do_not_run_and_the_mode_is_left_alone() -> None:
    layers = [LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.Dropout, 0.5), LayerDesc(nn.BatchNorm1D, 8)]
    with model_in_job(2, 4, layers=[*layers, LayerDesc(nn.Linear, 8, 4)]) as model:
        before = bits(model.layers.state_dict())
        first, again = (model.predict_batch(batch()[0]) for _ in range(2))
        assert (first.numpy() == again.numpy()).all()
        assert not model.layers.training
        assert bits(model.layers.state_dict()) == before
        assert first.stop_gradient


def test_nothing_is_kept_of_an_evaluation() -> None:
    with model_in_job(3, 4) as model:
        model.eval_batch(batch())
        assert model._runtime.stage._kept == {}
        assert all(parameter.grad is None for parameter in model.parameters())


def test_outputs_may_be_moved_to_the_host() -> None:
    with model_in_job(2, 4) as model:
        outputs = model.eval_batch(batch(), return_host_tensor=True)
        assert all(output.place.is_cpu_place() for output in outputs)
        plain = model.eval_batch(batch())
        assert [o.numpy().tolist() for o in outputs] == [o.numpy().tolist() for o in plain]


class Both(nn.Layer):
    def forward(self, x: Any) -> Any:
        return {"logits": x, "parts": (x.sum(), [x[:, 0], "first"]), "none": None}


def test_a_prediction_keeps_the_containers_of_the_output() -> None:
    with model_in_job(2, 4, layers=[*mlp_layers(), LayerDesc(Both)]) as model:
        result = model.predict_batch(rows_of(5)[0])
        logits = result["logits"]
        assert logits.shape == [5, CLASSES]
        sums, (column, text) = result["parts"]
        assert (sums.shape, column.shape) == ([3], [5])
        assert (column.numpy() == logits[:, 0].numpy()).all()
        assert (text, result["none"]) == ("first", None)


def test_a_prediction_takes_tuples_dicts_and_lists() -> None:
    def join(value: Any) -> Any:
        parts = value.values() if isinstance(value, dict) else value
        return paddle.concat(list(parts), axis=1)

    inputs = rows_of(5)[0]
    halves = (inputs[:, :2], inputs[:, 2:])
    with model_in_job(2, 4, layers=[join, *mlp_layers()]) as model:
        expected = model.predict_batch(halves).numpy()
        assert (model.predict_batch(dict(zip("ab", halves))).numpy() == expected).all()
        chunks = [tuple(half[k : k + 2] for half in halves) for k in (0, 2, 4)]
        assert (model.predict_batch(chunks).numpy() == expected).all()


def test_what_cannot_be_evaluated_is_refused() -> None:
    inputs, labels = rows_of(7)
    with model_in_job(2, 4) as model:
        with pytest.raises(ConfigError, match="no inputs"):
            model.predict_batch(None)
        with pytest.raises(ConfigError, match="no labels"):
            model.eval_batch([inputs, None], compute_loss=True)
        with pytest.raises(ConfigError, match="same number of micro-batches"):
            model.eval_batch([inputs, labels[:4]], compute_loss=True)
        with pytest.raises(ConfigError, match="rows"):
            model.eval_batch([inputs[:0], None])
        with pytest.raises(ConfigError, match="7 rows"):
            model.train_batch([inputs, labels], sgd(model))
        model = pipeline(loss_fn=None)
        assert model.predict_batch(inputs).shape == [7, CLASSES]
        with pytest.raises(ConfigError, match="no loss function"):
            model.eval_batch([inputs, labels], compute_loss=True)
