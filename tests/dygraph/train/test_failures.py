"""What a batch leaves behind, whether it trains, evaluates, predicts or fails: nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.errors import BoundaryError, ConfigError, PipelineTimeout, StateError, UsageError
from fleetpipe.fleet.meta_parallel import (
    LayerDesc,
    NoPipelineParallel,
    PipelineLayer,
    PipelineParallel,
)
from fleetpipe.job.job import current_job
from tests.dygraph.models import gradients_in_w
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


class Fails(nn.Layer):
    """Raises an error once, in the call of that number."""

    error: BaseException | None = None
    call = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        Fails.call -= 1
        if Fails.call == 0 and Fails.error is not None:
            raise Fails.error
        return self.linear(x)


@pytest.fixture(autouse=True)
def nothing_fails() -> Iterator[None]:
    yield
    Fails.error = None


def layers() -> list[Any]:
    return [
        LayerDesc(nn.Linear, FEATURES, 8),
        LayerDesc(nn.Dropout, 0.5),
        LayerDesc(Fails),
        nn.functional.tanh,
        LayerDesc(nn.Linear, 8, CLASSES),
    ]


class Counts(nn.Layer):
    """Counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        self.count += 1
        return x


class Centred(Counts):
    """A loss with a buffer, which may fail after it has changed that."""

    fails = False

    def forward(self, output: Any, label: Any) -> Any:
        super().forward(output)
        self.count = self.count * 2
        if self.fails:
            raise ValueError("bad rows")
        return nn.functional.cross_entropy(output, label)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZBH1"])
def test_buffers_are_as_before_a_batch_that_fails(schedule: str) -> None:
    loss, norm = Centred(), LayerDesc(nn.BatchNorm1D, 8)
    listed = [LayerDesc(nn.Linear, FEATURES, 8), norm, LayerDesc(Counts), norm]
    with job(2, 4, schedule):
        model = pipeline([*listed, LayerDesc(nn.Linear, 8, CLASSES)], loss_fn=loss)
        model.train_batch(batch(), sgd(model))
        before = bits(model.layers.state_dict()), bits(loss.state_dict())
        loss.fails = True
        with pytest.raises(BoundaryError, match="bad rows"):
            model.train_batch(batch(seed=1), sgd(model))
        assert (bits(model.layers.state_dict()), bits(loss.state_dict())) == before
        loss.fails = False
        model.train_batch(batch(seed=1), sgd(model))
        assert float(model.layers.state_dict()["2.count"][0]) == 8


def trained(ranks: int, schedule: str, error: BaseException | None, **options: Any) -> Any:
    """Trains on two batches, of which the first may fail; gives the second's loss and the model."""
    Fails.error, Fails.call = None, 0
    with job(ranks, micro_batches=4, schedule=schedule):
        model = pipeline(layers(), **options)
        optimizer = sgd(model)
        if error is not None:
            # Of 4 forwards the third; one of a split backward's is to find out about the layer.
            Fails.error, Fails.call = error, 3
            with pytest.raises(type(error)):
                model.train_batch(batch(4, seed=7), optimizer)
            assert all(parameter.grad is None for parameter in model.parameters())
            assert model._runtime.stage._saved == model._runtime.stage.split._tapes == {}
            assert model._runtime.stage._batch.data.inputs is None
        paddle.seed(11)
        loss = model.train_batch(batch(4, seed=1), optimizer)
        return loss.numpy().tobytes(), bits(model.layers.state_dict())


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("ranks", "schedule", "interval"),
    [(1, "1F1B", 0), (2, "1F1B", 0), (2, "FThenB", 0), (2, "ZBH1", 0), (2, "FThenB", 2)],
)
def test_the_batch_after_one_that_failed_is_as_if_it_had_not_been(
    ranks: int, schedule: str, interval: int, error: BaseException
) -> None:
    options = {"recompute_interval": interval, "recompute_ctx": {}}
    failed = trained(ranks, schedule, error, **options)
    assert failed == trained(ranks, schedule, None, **options)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_batch_that_ended_is_not_held(schedule: str) -> None:
    with job(2, micro_batches=4, schedule=schedule):
        model = pipeline()
        data = batch()
        inputs = weakref.ref(data[0])
        model.train_batch(data, sgd(model))
        del data
        assert inputs() is None
        outputs = [weakref.ref(output) for output in model.eval_batch(batch())]
        assert [output() for output in outputs] == [None] * 4


def test_a_first_batch_that_fails_decides_nothing_about_its_layers() -> None:
    with job(2, micro_batches=4, schedule="ZBH1"):
        model = pipeline()
        optimizer = sgd(model)
        inputs, labels = batch()
        with pytest.raises(BoundaryError, match=r"layer 0 \(Linear\) cannot take"):
            model.train_batch([inputs[:, :-1], labels], optimizer)
        model.train_batch([inputs, labels], optimizer)
        assert len(gradients_in_w(model._runtime.stage.split)) == len(model.parameters())


def test_a_failure_within_the_loss_stays_what_it_is() -> None:
    def late(_output: Any, _label: Any) -> Any:
        raise PipelineTimeout("a slice of the loss did not come")

    with job(2):
        model = pipeline(mlp_layers(), loss_fn=late)
        optimizer = sgd(model)
        with pytest.raises(PipelineTimeout, match="a slice of the loss"):
            model.train_batch(batch(), optimizer)


def test_a_wrapper_that_is_refused_is_not_connected() -> None:
    with job(2):
        with pytest.raises(ConfigError, match="without a pipeline"):
            NoPipelineParallel(PipelineLayer(mlp_layers(), num_stages=2))
        current = current_job()
        assert current is not None
        assert current.pipelines == []
        with pytest.raises(UsageError, match="wraps a PipelineLayer"):
            PipelineParallel(nn.Linear(2, 2))


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
def test_a_size_that_is_refused_changes_nothing(wrong: Any) -> None:
    with job(2):
        model = pipeline()
        for name in ("accumulate_steps", "micro_batch_size"):
            with pytest.raises(ConfigError, match=name):
                setattr(model, name, wrong)
        assert (model.accumulate_steps, model.micro_batch_size) == (4, 2)
        model.train_batch(batch(), sgd(model))


def test_a_number_of_micro_batches_that_the_schedule_cannot_run_changes_nothing() -> None:
    with job(2, micro_batches=4, schedule="Interleaved1F1B", groups=(2, 2)):
        model = pipeline(num_virtual_pipeline_stages=2)
        with pytest.raises(ConfigError):
            model.accumulate_steps = 3
        assert model.accumulate_steps == 4
        model.train_batch(batch(), sgd(model))


def test_another_micro_batch_size_keeps_the_hooks() -> None:
    called: list[int] = []
    with job(2):
        model = pipeline()
        model.register_forward_pipeline_parallel_hook(0, called.append)
        model.micro_batch_size = 1
        with pytest.raises(StateError, match="numbered hooks"):
            model.accumulate_steps = 2
        model.train_batch(batch(2), sgd(model))
    # Once for each of the two ranks that this process plays.
    assert called == [0, 0]


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


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rows", [1, 6, 8, 13])
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
        assert len(model.eval_batch(items, return_host_tensor=True)) == 4
        model.eval_batch(items, compute_loss=True)
        assert len(list(items)) == 1
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


def test_a_prediction_keeps_the_containers_of_the_output() -> None:
    def both(x: Any) -> Any:
        return {"logits": x, "parts": (x.sum(), [x[:, 0], "first"]), "none": None}

    with model_in_job(2, 4, layers=[*mlp_layers(), both]) as model:
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
