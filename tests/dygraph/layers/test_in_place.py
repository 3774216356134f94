"""Layers that write into what a stage was given, in training as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.layers.run_stage import StageRunner
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.partition import LayerInfo, Partition
from tests.pipelines import batch, job, pipeline, sgd, train

WRITERS: dict[str, Callable[[Any], Any]] = {
    "relu_": nn.functional.relu_,
    "softmax_": nn.functional.softmax_,
    "add_": lambda x: x.add_(paddle.ones_like(x)),
    "scale_": lambda x: x.scale_(2.0),
}


class Writer(nn.Layer):
    """Writes into its input after a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1D(8)

    def forward(self, x: Any) -> Any:
        return self.norm(nn.functional.relu_(x)) * 2


def around(writer: Any) -> list[Any]:
    """The layers of a model whose second stage begins with ``writer``."""
    return [LayerDesc(nn.Linear, 6, 8), writer, LayerDesc(nn.Linear, 8, 4)]


@pytest.mark.parametrize("kind", [*WRITERS, "layer"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("interval", [0, 1])
def test_a_stage_may_begin_with_a_layer_that_writes(
    kind: str, schedule: str, interval: int
) -> None:
    writer = WRITERS.get(kind) or LayerDesc(Writer)
    options = {"recompute_interval": interval, "recompute_ctx": {}} if interval else {}
    found = train(around(writer), 2, schedule, seg_method=[0, 1], **options)
    assert found == train(around(writer), 1)


def test_the_users_data_stay_as_they_are() -> None:
    layers = [nn.functional.relu_, LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.Linear, 8, 4)]
    data = batch()
    before = [tensor.clone() for tensor in data]
    with job(2, 4, "ZBH1"):
        model = pipeline(layers)
        model.train_batch(data, sgd(model))
    for tensor, same in zip(data, before):
        assert tensor.numpy().tobytes() == same.numpy().tobytes()


def test_what_nobody_writes_into_is_handed_on_as_it_is() -> None:
    seen = []

    def look(x: Any) -> Any:
        seen.append(x.is_leaf)
        return x * 1

    train(around(look), seg_method=[0, 1])
    # Of eight runs the first finds out.
    assert seen == [False] + [True] * 7


def test_only_what_is_written_into_is_copied() -> None:
    seen: list[tuple[Any, Any]] = []

    def write(value: tuple[Any, ...]) -> Any:
        kept, changed, *others = value
        seen.append((kept, changed))
        return sum([kept, changed.add_(paddle.ones([2])), *others])

    runner = StageRunner({0: write}, Partition((0, 1), "one", (LayerInfo("write"),)))
    first, second = paddle.ones([2]), paddle.ones([2])
    second.stop_gradient = False
    for _ in range(3):
        assert runner.function(0)((first, second), None).tolist() == [3, 3]
    # A first run tells; in others only the second is a copy.
    assert [kept is first for kept, _ in seen] == [False, True, True]
    assert not any(changed is second for _, changed in seen)
    assert second.tolist() == [1, 1]
    # Where another number of tensors comes, nobody knows which: all are copies.
    assert runner.function(0)((first, second, first * 2), None).tolist() == [5, 5]
    assert seen[-1][0] is not first
