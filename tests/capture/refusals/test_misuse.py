"""What a newcomer does wrong at the door of ``fleetpipe.pipeline``, and reads of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CaptureError, ConfigError, PartitionError, StateError, UsageError
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests.pipelines import job, sgd

X = paddle.to_tensor(np.random.default_rng(0).standard_normal((8, 3)).astype("float32"))
LABELS = paddle.to_tensor([[0], [1], [2], [0]] * 2)


class Net(nn.Layer):  # type: ignore[misc]
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.last(self.second(self.first(x)))


def made(model: Any = None, **options: Any) -> Any:
    """Makes a pipeline of two stages."""
    options.setdefault("split_spec", ["second"])
    return fleetpipe.pipeline(Net() if model is None else model, X[:2], **options)


class Loading(Net):
    """A loader's thread computes, calls layers and reads numbers while the model runs."""

    def forward(self, x: Any) -> Any:
        thread = threading.Thread(target=self.load)
        thread.start()
        thread.join()
        return super().forward(x)

    def load(self) -> None:
        other = nn.Linear(3, 3)
        self.last(other(paddle.tanh(X))).sum().backward()
        LOADED.append(float(other.weight.grad.sum()))


#: What threads have computed: a model itself is put back as it was.
LOADED: list[float] = []


def listed() -> Any:
    return PipelineLayer([LayerDesc(nn.Linear, 3, 3), LayerDesc(nn.Linear, 3, 3)], num_stages=1)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: made(split_spec="Auto", num_stages=2), ConfigError, "did you mean 'auto'"),
    (lambda: made(split_spec="auto", num_stages=9), PartitionError, "9 stages need 8 places"),
    (lambda: made(num_stages=0), ConfigError, "num_stages is no number of stages: 0"),
    (lambda: made(num_stages="2"), ConfigError, "num_stages is no number of stages: '2'"),
    (lambda: made(num_chunks=True), ConfigError, "num_chunks is no number of stages: True"),
    (lambda: made(split_spec=["second", "last"], num_chunks=2), ConfigError, "a multiple of num_"),
    (lambda: made(no_split=nn.Linear), ConfigError, r"pass a tuple: \(Block,\)"),
    (lambda: made(no_split=("Linaer",)), ConfigError, "'Linaer', did you mean 'Linear'"),
    (lambda: made(loss_fn="mse"), ConfigError, "a function or a built layer"),
    (lambda: made(lambda x: x), UsageError, "into the forward of a Layer"),
    (lambda: made(Net), UsageError, r"build it: Net\(\.\.\)"),
    (lambda: made(made()), UsageError, "a CapturedPipeline is a pipeline already"),
    (lambda: made(listed()), UsageError, "a PipelineLayer is a pipeline already"),
    (lambda: made(paddle.jit.to_static(Net())), UsageError, "the model as it was before"),
]


@pytest.mark.parametrize(("ask", "kind", "message"), REFUSED)
def test_it_is_refused_with_what_to_do(
    ask: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ask()


def test_the_number_of_ranks_is_the_jobs() -> None:
    with job(2):
        with pytest.raises(ConfigError, match=r"num_stages=3, and pp_degree=2 of fleet\.init"):
            made(num_stages=3)
        assert made(num_stages=2).placement.stages == 2


def test_classes_by_name() -> None:
    whole = nn.Sequential(Net(), nn.Linear(3, 3))
    assert len(fleetpipe.explain(whole, X[:2], no_split=("Net",)).trace.nodes) == 2


def test_a_model_in_evaluation_trains_and_goes_on_as_the_plain_model() -> None:
    with job(2):
        model = Net()
        model.eval()
        # Made for the plain model, as those do who wrap it later.
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        pipe = made(model, loss_fn=nn.CrossEntropyLoss())
        wrapped = fleet.distributed_model(pipe)
        before = model.first.weight.numpy().copy()
        wrapped.train_batch([X, LABELS], fleet.distributed_optimizer(optimizer))
        assert (model.first.weight.numpy() != before).all()
        model.eval()
        assert np.array_equal(model(X[:2]), wrapped.predict_batch(X[:2]))


def test_a_whole_batch_as_the_example_is_captured_anew_for_micro_batches() -> None:
    with job(2):
        pipe = fleetpipe.pipeline(Net(), X, nn.CrossEntropyLoss(), ["second"])
        model = fleet.distributed_model(pipe)
        assert np.isfinite(float(model.train_batch([X, LABELS], sgd(model))))


def test_without_a_loss_it_predicts_and_does_not_train() -> None:
    with job(2):
        model = fleet.distributed_model(made())
        assert model.predict_batch(X).shape == [8, 3]
        with pytest.raises(ConfigError, match="loss_fn="):
            model.train_batch([X, LABELS], sgd(model))


def test_a_capture_records_its_own_thread() -> None:
    model = Loading()
    nodes = fleetpipe.explain(model, X[:2]).trace.nodes
    assert [node.name for node in nodes] == ["first", "second", "last"]
    # What the other thread did is done.
    assert np.isfinite(LOADED).all()
    assert LOADED
    assert model.last.weight.grad.numpy().any()


class Sum(nn.Layer):  # type: ignore[misc]
    """Takes a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, values: Any) -> Any:
        return self.second(self.first(sum(values)))


@pytest.mark.parametrize("container", [list, tuple])
def test_a_list_as_one_input_is_given_as_a_tuple(container: type) -> None:
    """As many tensors as micro-batches: a list has one value for each of these."""
    values = [X[:6], 2 * X[:6], 3 * X[:6]]
    model = Sum()
    expected = float((model(values) ** 2).mean())
    with job(2, micro_batches=3, rows=2):
        pipe = fleetpipe.pipeline(
            model, ([value[:2] for value in values],), lambda o, _: (o**2).mean()
        )
        pipe = fleet.distributed_model(pipe)
        data = [(container(values),), [None] * 3]
        if container is list:
            with pytest.raises(CaptureError, match="another container than example_inputs"):
                pipe.eval_batch(data, compute_loss=True)
        else:
            loss = float(pipe.eval_batch(data, compute_loss=True))
            assert loss == pytest.approx(expected, rel=1e-6)


def test_static_graph_is_named_where_it_is_on() -> None:
    model, example = Net(), X[:2]
    paddle.enable_static()
    try:
        with pytest.raises(StateError, match="static graph is on"):
            PipelineLayer([model.first], num_stages=1)
        with pytest.raises(StateError, match="static graph is on"):
            fleetpipe.pipeline(model, example)
    finally:
        paddle.disable_static()
