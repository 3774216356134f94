"""What a batch leaves behind: nothing when it ends, and nothing when it fails."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

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
from tests.pipelines import CLASSES, FEATURES, batch, bits, job, mlp_layers, pipeline, sgd


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
            assert model._runtime.stage._kept == model._runtime.stage.split._tapes == {}
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


def test_an_evaluation_after_a_batch_that_failed_sees_its_own_inputs() -> None:
    with job(2, micro_batches=4, schedule="FThenB"):
        model = pipeline(layers())
        expected = model.predict_batch(batch()[0]).numpy()
        Fails.error, Fails.call = KeyError("mine"), 2
        with pytest.raises(KeyError):
            model.train_batch(batch(4, seed=7), sgd(model))
        assert (model.predict_batch(batch()[0]).numpy() == expected).all()


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
        assert model.deferral_report().immediate == {}
        assert len(model.deferral_report().deferred) == len(model.parameters())


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
