"""What ranks read below ``fit``: one batch in each pipeline, as many on each replica."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import FleetPipeError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests import jobs
from tests.fit.test_model import Digits
from tests.pipelines import bits

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
ROWS = 8


def model_in(**degrees: int) -> Any:
    jobs.begin(micro_batches=2, rows=ROWS // 2, **degrees)
    model = fleetpipe.Model([LayerDesc(nn.Linear, 64, 8), LayerDesc(nn.Linear, 8, 10)])
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    model.prepare(sgd, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    return model


def shuffled(workers: int) -> tuple[Any, ...]:
    """Fits data that a loader and a generator shuffle, on ranks that nobody seeded alike."""
    np.random.seed(RANK)
    random.seed(RANK)
    model, data = model_in(pp=2), Digits(0, 4 * ROWS)

    class Shuffled(paddle.io.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            yield from random.sample([*data], len(data))

    loader = paddle.io.DataLoader(data, batch_size=ROWS, shuffle=True, num_workers=workers)
    history = model.fit(loader, epochs=2, verbose=0)
    history |= {"stream": model.fit(Shuffled(), batch_size=ROWS, verbose=0)["loss"]}
    state = bits(model.network.full_state_dict())
    fleet.shutdown()
    return history, state


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_shuffles_gives_all_ranks_one_order(
    on_ranks: Callable[..., Any], workers: int
) -> None:
    alone = on_ranks(shuffled, None, workers)
    assert on_ranks(shuffled, 2, workers) == alone * 2


class Stream(paddle.io.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter([Digits(0, self.rows)[row] for row in range(self.rows)])


def unequal(method: str, kind: str) -> str:
    """Two replicas, of which the second has a batch more; what this rank is told."""
    model, rows = model_in(pp=1, dp=2), ROWS * (2 + RANK)
    data: Any = Stream(rows)
    if kind == "list":
        data = [[part[:ROWS] for part in (np.ones([9, 64], "float32"), np.ones([9, 1], int))]]
        data *= 2 + RANK
    options = {"verbose": 0, **({} if kind == "list" else {"batch_size": ROWS})}
    try:
        getattr(model, method)(data, **options)
    except FleetPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_replicas_with_more_batches_than_others_are_refused(
    on_ranks: Callable[..., Any], method: str, kind: str
) -> None:
    for text in on_ranks(unequal, 2, method, kind):
        assert "have more batches than those of others" in text
        assert ("rank: 2, 3" if kind == "list" else "of rank 0 ended after 2") in text


def evaluated(lacking: int) -> tuple[Any, ...]:
    """Evaluates a last batch that is shorter on the second replica; the mean of all rows beside."""
    model, digits = model_in(pp=1, dp=2), Digits(0, 2 * ROWS)
    logs = model.evaluate(Stream(2 * ROWS - lacking * RANK), batch_size=ROWS, verbose=0)
    network = model.network.single_model()
    model.network.copy_to(network)
    outputs = network(paddle.to_tensor(digits.images))
    losses = nn.functional.cross_entropy(
        outputs, paddle.to_tensor(digits.labels), reduction="none"
    ).flatten()
    fleet.shutdown()
    every = paddle.concat([losses, losses[: 2 * ROWS - lacking]])
    return logs["loss"][0], float(every.mean())


def test_an_evaluation_counts_the_rows_that_replicas_have(on_ranks: Callable[..., Any]) -> None:
    (first, mean), (second, _) = on_ranks(evaluated, 2, 3)
    assert first == second == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_data_may_fill_the_same_tensors_for_each_batch(accumulate: int) -> None:
    digits = Digits(0, 4 * ROWS)
    parts = [
        [column[start : start + ROWS] for column in (digits.images, digits.labels)]
        for start in range(0, 4 * ROWS, ROWS)
    ]

    def refilled() -> Iterator[Any]:
        tensors = [paddle.to_tensor(column) for column in parts[0]]
        for part in parts:
            for tensor, column in zip(tensors, part):
                tensor.set_value(column)
            yield tensors

    states = []
    for data in (parts, refilled()):
        model = model_in(pp=2)
        model.fit(data, verbose=0, accumulate_grad_batches=accumulate)
        states.append(bits(model.network.full_state_dict()))
        fleet.shutdown()
    assert states[0] == states[1]
